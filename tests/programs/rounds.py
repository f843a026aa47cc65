"""The same training run three ways: microbatch by microbatch, or in whole rounds. Every rank writes down its losses.

`argv[1]`: `microbatches`; `rounds`: one backward pass over the sum of a round's losses; `pipeline`: a backward pass
per microbatch inside the round, as a pipeline schedule runs them, and `step.backward` gets the sum without a graph.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.nn.functional as F

import recover

torch.set_num_threads(1)
world = recover.init()
torch.manual_seed(0)


class Stream:
    """Sample i, out of nothing but i."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, 16, generator=generator), torch.randn(4, 3, generator=generator)


model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
step = recover.Step(world, model, optimizer, global_batch=12, bucket_mb=0.002)
stream, mode = Stream(), sys.argv[1]


def loss_of(sample: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(sample[0]), sample[1])


def pipeline(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    total = torch.zeros(())
    for sample in batches:
        loss = loss_of(sample)
        loss.backward()
        total += loss.detach()
    return total


losses, rounds = [], []
while step.index < 6:
    if mode == "microbatches":
        for sample in step.microbatches(stream):
            step.backward(loss_of(sample))
    else:
        for batches in step.rounds(stream):
            rounds.append(len(batches))
            if mode == "pipeline":
                step.backward(pipeline(batches))
            else:
                step.backward(torch.stack([loss_of(sample) for sample in batches]).sum())
    assert step.weight == 12, step.weight
    losses.append(step.loss)
with open(f"{os.environ['RECOVER_RUN_DIR']}/diary-{world.rank}.jsonl", "w") as diary:
    facts = {"losses": losses, "rounds": rounds, "parameters": [p.tolist() for p in model.parameters()]}
    diary.write(json.dumps({"kind": "run", **facts}) + "\n")
