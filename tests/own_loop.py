"""A loop such as users write, on a dataset such as they have: for runs under the launcher and for one process."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

import recover

BATCH = 10  # microbatches of a step


class Items(Dataset):
    """Items of several lengths, with an augmentation that draws random numbers."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3 + index % 5, 8, generator=generator) + 0.1 * torch.rand(1, 8), index


def padded(items: list[tuple[torch.Tensor, int]]) -> dict[str, Any]:
    rows = torch.nn.utils.rnn.pad_sequence([row for row, _ in items], batch_first=True)
    return {"rows": rows, "items": [index for _, index in items]}


def make_stream(workers: int = 0) -> Any:
    return recover.stream(
        Items(), batch_size=3, shuffle=True, seed=7, collate_fn=padded, workers=workers, epochs=9
    )


def make_model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def make_optimizer(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6, 9], 0.5)


def make_average(model: torch.nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))


def loss_of(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return model(batch["rows"]).square().mean()


def digest(batch: dict[str, Any]) -> str:
    return hashlib.sha256(batch["rows"].numpy().tobytes() + repr(batch["items"]).encode()).hexdigest()[:16]


def reference(steps: int) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
    """Losses, parameters and their average, of one process."""
    model, stream, losses = make_model(), make_stream(), []
    (optimizer, scheduler), average = make_optimizer(model), make_average(model)
    for number in range(steps):
        total = torch.zeros(())
        for slot in range(BATCH):
            total = total + loss_of(model, stream[number * BATCH + slot]) / BATCH
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        average.update_parameters(model)
        losses.append(total.item())
    return losses, [p.detach() for p in model.parameters()], [p.detach() for p in average.parameters()]
