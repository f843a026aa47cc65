"""2 replicas x 3 shards. Rank 3 blocks in a gloo call on rank 4, rank 4 computes, and their peer rank 5 is killed.

Gloo reports it to neither of them, since they do not communicate with rank 5 just now. The healthy replica votes at
once.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import recover

world = recover.init()
run_dir = Path(os.environ["RECOVER_RUN_DIR"])
peers = dist.FileStore(str(run_dir / f"store-{world.replica}"), 3)
inside = dist.ProcessGroupGloo(peers, world.shard, 3)
inside.allreduce([torch.ones(1)]).wait()
assert world.agree(1) == 1

if world.rank == 5:
    while not all((run_dir / f"{rank}.blocks").exists() for rank in (3, 4)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
elif world.rank == 4:
    (run_dir / "4.blocks").touch()
    while True:
        signal.pause()  # a rank that waited for it would wait for ever
elif world.rank == 3:
    (run_dir / "3.blocks").touch()
    inside.recv([torch.ones(1)], 1, 7).wait()
else:
    assert world.agree(1) is None  # waits for ranks 3 and 4
    census = world.repair()
    assert census.members == (0, 1, 2), census
    total = torch.ones(1)
    inside.allreduce([total]).wait()
    assert total.item() == 3  # the healthy replica's own group was not touched
