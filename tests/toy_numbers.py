"""A model with a memory (running statistics) and with draws in data and layers, and what one process makes of it."""

from __future__ import annotations

import random

import numpy
import torch

from recover.step.randomness import Randomness

BATCH, STEPS = 6, 3


class Net(torch.nn.Module):
    """BatchNorm's buffers are known as running buffers, `seen` has to be named as one, and `table` never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.dropout = torch.nn.Dropout(0.2)
        self.outer = torch.nn.Linear(16, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.lerp_(x.abs().mean(), 0.1)
        return self.outer(self.dropout(self.norm(torch.tanh(self.inner(x))))) + self.table


class Stream:
    """Sample i, with noise from all three generators, as augmentations would draw it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(index))
        return x + 0.1 * torch.randn(8, 8) + 0.1 * random.random() + 0.1 * float(numpy.random.rand())


def make_net() -> Net:
    torch.manual_seed(1)
    return Net()


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def seed_user() -> None:
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(5)


def draws() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(numpy.random.rand())]


def reference(shards: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters and buffers by the rule, in one process: every part of a microbatch starts from the same buffers."""
    model = make_net()
    optimizer, stream, parts = make_optimizer(model), Stream(), BATCH * shards
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        start = {name: buffer.clone() for name, buffer in model.named_buffers()}
        changes = {name: torch.zeros_like(buffer, dtype=torch.float64) for name, buffer in start.items()}
        for slot in range(BATCH):
            for shard in range(shards):
                model.load_state_dict(start, strict=False)
                randomness = Randomness(0, shard)
                randomness.read(step, slot)
                rows = stream[(step - 1) * BATCH + slot].chunk(shards)[shard]
                randomness.compute(step, slot)
                (loss_of(model, rows) / parts).backward()
                for name, buffer in model.named_buffers():
                    changes[name] += buffer.double() - start[name].double()
        optimizer.step()
        for name, buffer in model.named_buffers():
            count = parts if buffer.is_floating_point() else shards
            buffer.copy_(start[name].double() + changes[name] / count)
    return {n: p.detach() for n, p in model.named_parameters()}, dict(model.named_buffers())
