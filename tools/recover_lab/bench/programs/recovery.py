"""Run by every rank of `recover bench recovery`: lose a replica inside a reduction, commit the step all the same."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from recover_lab.peers.kills import timed_steps

import recover
from recover.faults import Fault
from recover.faults.probe import Probe
from recover.train.models import SIZES, Llama

torch.set_num_threads(1)
world = recover.init()
run_dir = Path(os.environ["RECOVER_RUN_DIR"])
config = replace(SIZES["tiny"], seq_len=32)


def fire(kill: Fault) -> None:
    (run_dir / f"killed-{kill.step}").write_text(repr(time.time()))
    os.kill(os.getpid(), 9)
    time.sleep(60)


# One replica dies in every third step, in the middle of a reduction; the first one lives to the end.
victims = range(world.grid.replicas - 1, 0, -1)
kills = [Fault(5 + 3 * n, victim, "in-reduce") for n, victim in enumerate(victims)]
world.hooks = Probe(world.replica, world.shard, kills, fire)
model = Llama(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = recover.Step(world, model, optimizer, global_batch=2 * world.grid.replicas, clip=1.0, bucket_mb=2)


class Stream:
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, 256, (1, 33), generator=torch.Generator().manual_seed(index))
        return tokens[:, :-1], tokens[:, 1:]


def run(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    step.backward(model(*batch))


rows = [
    {
        **row,
        "discarded": sum(incident.discarded_microbatches for incident in step.incidents),
        "repair_ms": [incident.repair_ms for incident in step.incidents],
    }
    for row in timed_steps(step, world.replica, Stream(), kills[-1].step + 1, run, lambda: None)
]
(run_dir / f"rows-{world.rank}.json").write_text(json.dumps(rows))
