"""2 replicas x 2 shards; rank 2 dies after the gate of its replica and before the vote. Which verdicts are reached?

`argv[1]` = per-group: every cross-replica group votes for itself, as in the paper. `world`: one agreement over all.
"""

from __future__ import annotations

import json
import os
import sys
import time

import recover
from recover.world.fabrics.openmpi import MPI

world = recover.init()
comm = MPI.COMM_WORLD
group = comm.Split(world.shard, world.rank)
inner = comm.Split(world.replica, world.rank)
for made in (group, inner):
    made.Set_errhandler(MPI.ERRORS_RETURN)
assert world.agree(1) == 1

world.hooks.step = 1
inner.Barrier()  # the paper's gate: all ranks of this replica got here
if world.rank == 2:
    time.sleep(0.3)  # the others vote meanwhile
    world.hooks("vote")
if sys.argv[1] == "per-group":
    try:
        group.Agree(1)
        verdict = "commit"
    except MPI.Exception:
        verdict = "fail"
else:
    verdict = "fail" if world.agree(1) is None else "commit"
with open(f"{os.environ['RECOVER_RUN_DIR']}/diary-{world.rank}.jsonl", "w") as diary:
    diary.write(json.dumps({"kind": "verdict", "verdict": verdict}) + "\n")
if sys.argv[1] == "world":
    world.repair()
else:
    diaries = [f"{os.environ['RECOVER_RUN_DIR']}/diary-{rank}.jsonl" for rank in (0, 1, 3)]
    while not all(map(os.path.exists, diaries)):
        time.sleep(0.01)  # a rank that leaves would be taken for a dead peer
    os._exit(0)
