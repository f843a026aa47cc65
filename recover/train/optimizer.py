"""The optimizer that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recover.train.config import Config


def make_optimizer(config: Config, model: torch.nn.Module) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True if can_fuse(parameters) else None,
    )


def can_fuse(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether one fused kernel can update all parameters: on GPUs, and only if all are sharded in the same way."""
    meshes = {getattr(parameter, "device_mesh", None) for parameter in parameters}
    return bool(parameters) and all(parameter.is_cuda for parameter in parameters) and len(meshes) == 1
