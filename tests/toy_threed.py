"""The tiny LLaMA's variants for replicas of several ranks, and what one process makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from toy_llama import CONFIG, Tokens

from recover.models import Llama, LlamaConfig


def config_of(section: dict[str, Any]) -> LlamaConfig:
    interleaved = section.get("schedule") == "interleaved"
    return dataclasses.replace(
        CONFIG,
        layers=2 * CONFIG.layers if interleaved else CONFIG.layers,
        tied=section.get("tied", False),
        experts=section.get("experts", 0),
    )


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Plain steps: with Adam's, a gradient's last bits would decide about the sign of a whole step."""
    return torch.optim.SGD(model.parameters(), lr=0.5)


@dataclasses.dataclass
class Expected:
    """One committed step of one process."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]  # as the optimizer gets them


def reference(section: dict[str, Any], clip: float | None = 1.0) -> tuple[dict[int, Expected], Llama]:
    """Every step of a section, by its number, and the model after the last."""
    torch.manual_seed(3)
    model = Llama(config_of(section))
    optimizer, stream, batch = make_optimizer(model), Tokens(), section["batch"]
    steps = {}
    for done in range(section.get("from", 0), section.get("from", 0) + section["steps"]):
        optimizer.zero_grad()
        total = 0.0
        for slot in range(batch):
            loss = model(*stream[done * batch + slot]) / batch
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        steps[done + 1] = Expected(total, norm, gradients)
        optimizer.step()
    return steps, model
