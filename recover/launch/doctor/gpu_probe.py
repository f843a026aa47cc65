"""The program of `recover doctor` on GPUs: reductions, one rank killed in one of them, and one more
reduction.

Argument: the device, `cuda`, or `cpu` to test the program itself. The carrier is that of the job.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from recover.job.process import rank_on_host
from recover.launch.init import init

PIECES = 25_000_000  # float32: 100 MB, so that the rank dies during the reduction
LIMIT = 40.0  # seconds


def main(kind: str) -> None:
    device = torch.device(kind)
    if kind == "cuda":  # before the world is made: its groups are made on it
        device = torch.device("cuda", rank_on_host() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    world = init()
    directory = Path(world.job.run_dir or ".")
    source = torch.ones(PIECES if kind == "cuda" else PIECES // 100, device=device)
    victim, killed = world.grid.ranks - 1, directory / "killed"

    def summed() -> bool:
        """Whether the reduction succeeded with the right sum."""
        out = torch.empty_like(source)
        return world.cross.all_reduce(source, out).wait() and bool((out == len(world.members)).all())

    assert summed()

    def die() -> None:
        killed.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == victim:
        threading.Timer(0.5, die).start()
    deadline = time.monotonic() + LIMIT
    while world.agree(1 if summed() else 0) is not None and time.monotonic() < deadline:
        pass
    world.repair()
    right = summed()
    report = {
        "survivors": len(world.members),
        "going_on": right,
        "milliseconds": 1e3 * (time.time() - float(killed.read_text())),
        "card": torch.cuda.get_device_name(device) if kind == "cuda" else kind,
    }
    if world.agree(1 if right else 0) and world.rank == world.members[0]:
        (directory / "probe.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
