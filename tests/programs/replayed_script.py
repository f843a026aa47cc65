"""A script whose steps are computed again: it saves, resumes, calls functions on one replica, and draws numbers.

replayed_script.py PLACE STEPS [--save] [--sharded]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import recover

place, steps, flags = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
world = recover.init()
torch.manual_seed(5)


class Numbers:
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(2, 8, generator=torch.Generator().manual_seed(index))


model: torch.nn.Module = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
)
if "--sharded" in flags:
    model = recover.hsdp(model, world)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
step = recover.Step(
    world, model, optimizer, global_batch=6, clip=1.0, scheduler=scheduler, reduction="reproducible"
)


def log() -> None:
    with (place / "log.txt").open("a") as file:
        print(step.index, file=file)


if "--save" in flags:
    recover.resume(step, place)
while step.index < steps:
    for sample in step.microbatches(Numbers()):
        step.backward(model(sample).pow(2).mean())
    step.on_first(log)
    if "--save" in flags and step.index % 3 == 0:
        recover.save(step, place, keep=10)
