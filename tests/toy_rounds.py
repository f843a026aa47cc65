"""A small model and its samples for runs by rounds, and what one process makes of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

BATCH, STEPS = 12, 6


class Stream:
    """Sample i is a function of i alone."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, 16, generator=generator), torch.randn(4, 3, generator=generator)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: torch.nn.Module, sample: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(sample[0]), sample[1])


def reference() -> tuple[list[float], list[list[float]]]:
    """Losses and final parameters of one process, microbatch by microbatch."""
    model, stream, losses = make_model(), Stream(), []
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for index in range(step * BATCH, (step + 1) * BATCH):
            loss = loss_of(model, stream[index]) / BATCH
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, [parameter.tolist() for parameter in model.parameters()]
