"""A training run in whole rounds. Every rank writes down its losses, its rounds by step, and its parameters.

In odd steps there is one backward pass over the sum of a round's losses; in even ones a backward pass per microbatch
inside the round, as a pipeline schedule runs them, and `step.backward` gets the sum without a graph.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import recover

sys.path.insert(0, str(Path(__file__).parents[1]))
from toy_rounds import BATCH, STEPS, Stream, loss_of, make_model, make_optimizer

torch.set_num_threads(1)
world = recover.init()
model = make_model()
step = recover.Step(world, model, make_optimizer(model), global_batch=BATCH, bucket_mb=0.002)
stream = Stream()


def pipeline(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    total = torch.zeros(())
    for sample in batches:
        loss = loss_of(model, sample)
        loss.backward()
        total += loss.detach()
    return total


losses, rounds = [], []
while step.index < STEPS:
    rounds.append([])
    for batches in step.rounds(stream):
        rounds[-1].append(len(batches))
        if step.index % 2:
            step.backward(pipeline(batches))
        else:
            step.backward(torch.stack([loss_of(model, sample) for sample in batches]).sum())
    assert step.weight == BATCH, step.weight
    losses.append(step.loss)
with open(f"{os.environ['RECOVER_RUN_DIR']}/diary-{world.rank}.jsonl", "w") as diary:
    facts = {"losses": losses, "rounds": rounds, "parameters": [p.tolist() for p in model.parameters()]}
    diary.write(json.dumps({"kind": "run", **facts}) + "\n")
