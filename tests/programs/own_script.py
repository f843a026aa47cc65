"""A script with habits of its own: two Steps one after the other, evaluation in between, prints, a log, a bar."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import recover

world = recover.init()
run_dir = Path(os.environ["RECOVER_RUN_DIR"])


class Numbers:
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(2, 4, generator=torch.Generator().manual_seed(index))


def take(steps: int, lr: float) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    step = recover.Step(world, model, optimizer, global_batch=6)
    while step.index < steps:
        for batch in step.microbatches(Numbers()):
            step.backward(model(batch).pow(2).mean(), weight=2.0)
        with torch.no_grad():
            heldout = model(Numbers()[0]).pow(2).mean().item()
        with (run_dir / "my.log").open("a") as log:
            print(step.index, heldout, file=log)
        sys.stderr.write(f"\rbar {step.index}/{steps}")
        print(f"step {step.index} loss {step.loss:.4f}")
        breakpoint()
        time.sleep(0.2)  # a launcher polls twice a second


def launched_by() -> list[str]:
    """Variables by which libraries find out whether they are one of several processes."""
    words = (
        "_WORLD_SIZE",
        "_WORLD_RANK",
        "_WORLD_LOCAL_RANK",
        "PMI_SIZE",
        "PMIX_RANK",
        "PMI_RANK",
        "WORLD_SIZE",
    )
    return [name for name in os.environ if name.endswith(words)]


print("launched by", launched_by())
print("local rank", os.environ["LOCAL_RANK"])
take(3, lr=0.1)
take(6, lr=0.05)
