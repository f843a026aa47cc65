"""The state of a step: everything that training has changed, and that another replica needs to
continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch


@dataclass(frozen=True)
class StepState:
    """All state but the position of the step, which is `step.state_dict()`.

    `extra`: entries of the user by name: objects with state_dict() and load_state_dict(),
    tensors, plain values.
    """

    EXTRA: ClassVar[str] = "extra."

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    scheduler: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def named(self) -> dict[str, Any]:
        """All entries but model and optimizer, under unique names."""
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler}
        return {**scheduler, **{f"{self.EXTRA}{name}": value for name, value in self.extra.items()}}
