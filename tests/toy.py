"""A small model and an endless stream of samples, for runs under the launcher and for their one-process reference."""

from __future__ import annotations

import torch


class Stream:
    """Sample i is a function of i alone."""

    def __init__(self, poison: int | None = None, nan: int | None = None, noise: float = 0.0) -> None:
        self._poison, self._nan, self._noise = poison, nan, noise

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        if index == self._poison:
            raise ValueError("this sample cannot be read")
        generator = torch.Generator().manual_seed(index)
        inputs, target = torch.randn(4, 16, generator=generator), torch.randn(4, 3, generator=generator)
        if self._noise:
            inputs = inputs + self._noise * torch.randn(inputs.shape)  # drawn as an augmentation would draw
        return inputs, target * float("nan") if index == self._nan else target, index


def spiked(loss: torch.Tensor, factor: float) -> torch.Tensor:
    """The same loss with a gradient that is `factor` times as large."""
    return loss.detach() + factor * (loss - loss.detach())


class Model(torch.nn.Module):
    """Some microbatches use all parameters and some do not. The model counts them, and averages their inputs."""

    def __init__(self, always: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.always = always
        self.dropout = torch.nn.Dropout(dropout)
        self.inner = torch.nn.Linear(16, 64)
        self.sometimes = torch.nn.Linear(64, 64)
        self.outer = torch.nn.Linear(64, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(16))

    def forward(self, inputs: torch.Tensor, index: int) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.average.lerp_(inputs.mean(0), 0.1)
        hidden = torch.tanh(self.inner(inputs))
        if self.always or index % 3 == 0:
            hidden = hidden + torch.tanh(self.sometimes(hidden))
        return self.outer(self.dropout(hidden))


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: torch.nn.Module, sample: tuple[torch.Tensor, torch.Tensor, int]) -> torch.Tensor:
    inputs, target, index = sample
    return torch.nn.functional.mse_loss(model(inputs, index), target)


MEMORY = ("count", "average")


def remembered(batches: list[list[int]]) -> tuple[int, torch.Tensor]:
    """The model's buffers after these steps: one update of the average per step, by the mean over its samples."""
    average, stream = torch.zeros(16, dtype=torch.float64), Stream()
    for batch in batches:
        seen = torch.stack([stream[index][0].mean(0) for index in batch]).double().mean(0)
        average += 0.1 * (seen - average)
    return sum(map(len, batches)), average


def reference(
    start: list, batches: list[list[int]], always: bool = False
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and final parameters of one process that trains on these samples, step by step."""
    model = Model(always)
    for parameter, value in zip(model.parameters(), start, strict=True):
        parameter.data.copy_(torch.tensor(value))
    optimizer, stream, losses = make_optimizer(model), Stream(), []
    for batch in batches:
        optimizer.zero_grad(set_to_none=False)
        total = 0.0
        for index in batch:
            loss = loss_of(model, stream[index]) / len(batch)
            loss.backward()
            total += loss.item()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        losses.append(total)
    return losses, [parameter.detach() for parameter in model.parameters()]
