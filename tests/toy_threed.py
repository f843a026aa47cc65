"""The tiny LLaMA's variants for replicas of several ranks, and what one process makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from toy_llama import CONFIG, Tokens, real

from recover.train.models import Llama, LlamaConfig


def config_of(section: dict[str, Any]) -> LlamaConfig:
    interleaved = section.get("schedule") == "interleaved"
    return dataclasses.replace(
        CONFIG,
        layers=2 * CONFIG.layers if interleaved else CONFIG.layers,
        tied=section.get("tied", False),
        experts=section.get("experts", 0),
        dropout=section.get("dropout", 0.0),
    )


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Plain steps: with Adam's, a gradient's last bits would decide about the sign of a whole step."""
    return torch.optim.SGD(model.parameters(), lr=0.5)


@dataclasses.dataclass
class Expected:
    """One committed step of one process."""

    loss: float
    norm: float
    weight: float
    gradients: dict[str, torch.Tensor]  # as the optimizer gets them


def reference(section: dict[str, Any]) -> tuple[dict[int, Expected], Llama]:
    """Every step of a section, by its number, and the model after the last."""
    torch.manual_seed(3)
    model, padded = Llama(config_of(section)), section.get("padded", False)
    optimizer, stream, batch = make_optimizer(model), Tokens(padded), section["batch"]
    steps = {}
    for done in range(section.get("from", 0), section.get("from", 0) + section["steps"]):
        optimizer.zero_grad()
        samples = [stream[done * batch + slot] for slot in range(batch)]
        weights = [weight_of(targets, padded) for _, targets in samples]
        total = 0.0
        for (tokens, targets), weight in zip(samples, weights, strict=True):
            loss = model(tokens, targets) * weight / sum(weights)
            loss.backward()
            total += loss.item()
        clip = section.get("clip", 1.0) or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        steps[done + 1] = Expected(total, norm, sum(weights), gradients)
        optimizer.step()
    return steps, model


def weight_of(targets: torch.Tensor, padded: bool) -> float:
    """The weight of a microbatch: the number of targets that count if it is padded, otherwise 1."""
    return float(real(targets)) if padded else 1.0
