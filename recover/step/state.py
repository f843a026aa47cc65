"""The state of a step: all that a replica has become by what it was trained on, and all that another needs to go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch


@dataclass(frozen=True)
class StepState:
    """Beside the step's own position, which is `step.state_dict()`.

    `extra` are the user's own, by name: objects with state_dict() and load_state_dict(), tensors, plain values.
    """

    EXTRA: ClassVar[str] = "extra."

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def named(self) -> dict[str, Any]:
        """All but model and optimizer, by names that never meet."""
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler}
        return {**scheduler, **{f"{self.EXTRA}{name}": value for name, value in self.extra.items()}}
