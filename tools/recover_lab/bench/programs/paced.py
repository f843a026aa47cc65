"""A loop whose microbatches take a given time by sleeping, longer on the last replica from some step on.

Arguments: seconds per microbatch, factor of the slow replica, steps before it is slow, all steps, B.
"""

import sys
import time

import torch

import recover

seconds, factor = map(float, sys.argv[1:3])
calm, steps, batch = map(int, sys.argv[3:])
torch.set_num_threads(1)
world = recover.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
step = recover.Step(world, model, torch.optim.SGD(model.parameters(), lr=0.01), batch, policy="paced")


class Stream:
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1, 4), float(index % 7))


while step.index < steps:
    is_slow = world.replica == world.grid.replicas - 1 and step.index >= calm
    for microbatch in step.microbatches(Stream()):
        time.sleep(seconds * (factor if is_slow else 1.0))
        step.backward(model(microbatch).square().mean())
