"""Gradient clipping: one limit for the norm of the whole gradient, or one limit for each parameter
group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recover.gradients.optimizers import groups_of, optimizers_of

Clip = float | Sequence[float | None] | None


class Clipping:
    """The limits of a step.

    clip:       a number, the limit of the norm over all parameters; or one entry for each parameter group of the
                optimizers, in their order, each the limit of the norm of that group alone. None: no limit
    """

    def __init__(self, clip: Clip, optimizer: Any) -> None:
        self.by_group = isinstance(clip, list | tuple)
        self._limits: list[Any] = list(clip) if isinstance(clip, list | tuple) else [clip]
        self._optimizer = optimizer
        for number, limit in enumerate(self._limits):
            name = f"clip[{number}]" if self.by_group else "clip"
            refuse_non_positive(name, limit)
        self.refuse_other_groups()

    @property
    def parts(self) -> int:
        """Number of norms that are taken of a gradient."""
        return len(self._limits)

    def refuse_other_groups(self) -> None:
        """Raise if there is not one limit for each parameter group."""
        groups = groups_of(self._optimizer)
        if not self.by_group or len(self._limits) == len(groups):
            return
        each = ", ".join(
            f"{type(one).__name__} {len(one.param_groups)}" for one in optimizers_of(self._optimizer)
        )
        raise ValueError(
            f"clip has {len(self._limits)} entries, and there are {len(groups)} parameter groups ({each}); give one "
            "entry for each group, in the order of the optimizers, and None for a group that is not clipped"
        )

    def part_of(self) -> dict[torch.nn.Parameter, int]:
        """The number of the norm that each parameter enters; empty if all enter one norm."""
        if not self.by_group:
            return {}
        return {
            parameter: number
            for number, group in enumerate(groups_of(self._optimizer))
            for parameter in group["params"]
        }

    def factors(self, norms: Sequence[float]) -> list[float]:
        """Factors for the gradients of each part, from the norms of the parts."""
        return [
            limit / (norm + 1e-6) if limit is not None and norm > limit else 1.0
            for limit, norm in zip(self._limits, norms, strict=True)
        ]


def refuse_non_positive(name: str, value: Any) -> None:
    """Raise ValueError for an argument that is neither a positive number nor None."""
    if value is None:
        return
    if isinstance(value, bool) or not hasattr(value, "__float__") or not float(value) > 0:
        raise ValueError(f"{name} is {value!r}; it must be a positive number, or None")
