"""A Hugging Face model on sharded replicas, saved and resumed, with an average of its weights as an extra.

Arguments: a folder for checkpoints, and the number of steps. Works with any number of ranks in a replica.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import torch

import recover
from recover.parallel import rows

sys.path.insert(0, str(Path(__file__).parents[1]))
from constructs import BATCH, Padded, adamw, targets_of
from huggingface import qwen2

place, steps = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
world = recover.init()
torch.manual_seed(1)
model = qwen2(layers=3)
if world.grid.replica_size > 1:
    model = recover.hsdp(model, world, checkpoint_activations=True)
optimizer = adamw(model)


class Average:
    """An average of the weights, shard by shard."""

    def __init__(self) -> None:
        self.values = {name: copy.deepcopy(p.detach()) for name, p in named()}

    def update(self) -> None:
        for name, parameter in named():
            self.values[name].lerp_(parameter.detach(), 0.5)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.values

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            self.values[name].copy_(value)


def named() -> list[tuple[str, torch.Tensor]]:
    return [(name.replace("_checkpoint_wrapped_module.", ""), p) for name, p in model.named_parameters()]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


average = Average()
step = recover.Step(world, model, optimizer, BATCH)
recover.resume(step, place, {"average": average})
while step.index < steps:
    for batch in step.microbatches(Padded()):
        mine = rows(world, batch)
        step.backward(model(**mine).loss, weight=targets_of(mine))
    average.update()
    if step.index % 2 == 0:
        recover.save(step, place, {"average": average}, keep=1)
found = [{name: whole(p) for name, p in named()}, {name: whole(v) for name, v in average.values.items()}]
torch.save(found, f"{os.environ['RECOVER_RUN_DIR']}/{world.rank}.pt")
