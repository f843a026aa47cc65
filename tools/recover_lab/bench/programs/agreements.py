"""Run by `recover bench hosts`: replicas of one rank each that agree on and on, in etcd, after work of uneven length.

Arguments: endpoints, prefix, number of replicas, agreements, seconds of work between two (up to), a directory. Each
rank writes down when it came to each agreement, and when it held the result; all clocks are this machine's.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

from recover.world.fabrics.etcd.client import EtcdClient
from recover.world.fabrics.etcd.fabric import EtcdFabric
from recover.world.liveness.board import Board

WARM_UP = 3  # agreements that do not count


def run_rank(rank: int, size: int) -> None:
    endpoints, prefix, _, agreements, work, directory = sys.argv[1:]
    board = Board(Path(directory, "board"), size)
    fabric = EtcdFabric(EtcdClient(endpoints, prefix=prefix, token="bench"), rank, size, board)
    times = []
    for number in range(WARM_UP + int(agreements)):
        time.sleep(random.Random(f"{rank} {number}").uniform(0, float(work)))
        came = time.monotonic()
        if fabric.agree(3) != 3:
            raise RuntimeError(f"agreement {number} of rank {rank} has failed, and nobody has died")
        times.append((came, time.monotonic()))
    Path(directory, f"times-{rank}.json").write_text(json.dumps(times[WARM_UP:]))


def main() -> None:
    size, children = int(sys.argv[3]), []
    for rank in range(size):
        child = os.fork()
        if not child:
            code = 1
            try:
                run_rank(rank, size)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
