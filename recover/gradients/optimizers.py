"""One optimizer, or a list of several: every part of a step takes both, and the list is one
sequence of parameter groups."""

from __future__ import annotations

from typing import Any

import torch


def optimizers_of(optimizer: Any) -> tuple[Any, ...]:
    """All optimizers, in their order."""
    return tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """The parameter groups of all optimizers, in their order: the dicts themselves."""
    return [group for each in optimizers_of(optimizer) for group in each.param_groups]


def parameters_of(optimizer: Any) -> list[torch.nn.Parameter]:
    """The parameters of all groups, in their order."""
    return [parameter for group in groups_of(optimizer) for parameter in group["params"]]
