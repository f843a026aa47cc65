"""Run by every rank: steps in which a call, the storage or a sample holds ranks up; argument: a JSON object.

`hold`: seconds for which rank 1 holds Python's lock between two steps; `stall`: seconds for which all but the first
replica wait for their data in one step; `sample`: seconds that one sample takes, whichever rank reads it; `last`: the
same of a later one, if given. Each rank records what it has seen in a diary.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time

import torch

import recover

HELD_AFTER, STALLED, LONG, LAST, STEPS = 3, 5, 7, 9, 10
BATCH, SLOT = 10, 3

options = json.loads(sys.argv[1])
torch.set_num_threads(1)
world = recover.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
step = recover.Step(world, model, torch.optim.SGD(model.parameters(), lr=0.1), BATCH)
diary = open(f"{os.environ['RECOVER_RUN_DIR']}/diary-{world.rank}.jsonl", "w", buffering=1)  # noqa: SIM115
stalled: set[int] = set()


class Stream:
    def __getitem__(self, index: int) -> torch.Tensor:
        number = step.index + 1
        if number == STALLED and world.replica and not stalled:
            stalled.add(number)
            time.sleep(options["stall"])
        for when, name in ((LONG, "sample"), (LAST, "last")):
            if index == (when - 1) * BATCH + SLOT:
                time.sleep(options.get(name, 0.0))
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(index))


stream = Stream()
while step.index < STEPS:
    for batch in step.microbatches(stream):
        step.backward(model(batch).square().mean())
    print(json.dumps({"kind": "commit", "step": step.index, "replicas": world.replicas}), file=diary)
    if step.index == HELD_AFTER and world.rank == 1:
        until = time.monotonic() + options["hold"]
        while time.monotonic() < until:
            ctypes.PyDLL(None).usleep(int(1e6 * max(0.0, until - time.monotonic())))  # PyDLL keeps the lock
