"""What a step asks of the inside of a replica: to combine a few numbers, and which parameters its ranks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Partners(Protocol):
    """The ranks of a replica that hold the same parameter, each with a part of its gradient. One object per group."""

    size: int

    def add_up(self, sums: torch.Tensor) -> None:
        """The sum over the partners, in place: the same bits on all of them."""


@dataclass(frozen=True)
class Sharing:
    """How a parameter is held by the ranks of a replica."""

    copies: int = 1  # ranks that hold the same values: in the norm of the gradient they count once
    partners: Partners | None = None  # those whose gradients have to be added to this rank's


ALONE = Sharing()


class Replica(Protocol):
    """The inside of a replica."""

    size: int
    mates_hold_all_buffers: bool = (
        True  # each rank computes rows with the whole model, not rows with a part of it
    )

    def combine(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a small float64 tensor over the replica's ranks, the same on all of them.

        Called by all of them at the same points of every attempt, whatever became of the reduction across replicas:
        a rank that left it out would leave its mates blocked.
        """

    def combine_numbers(self, values: list[float]) -> list[float]:
        """The same for a few numbers that are no tensor."""
        combined: list[float] = self.combine(torch.tensor(values, dtype=torch.float64)).tolist()
        return combined

    def combine_max(self, values: list[int]) -> list[int]:
        """The maximum over the replica's ranks, element by element; under the same rules as `combine`."""
        raise NotImplementedError

    def reshard(self) -> None:
        """Bring the parameters into the form in which the optimizer sees them: an evaluation may have left another."""
        return

    def knows(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the replica's ranks sum the gradient of this parameter as they should."""
        return True

    def seed_with(self, seed: Callable[[int, int], None]) -> None:
        """How to start the draws of a microbatch of a round, by its number, in one of this rank's stages."""
        return

    def weights_of_round(self) -> list[float] | None:
        """Those with which the backward passes of the last round have run, told once; None if they run in the step."""
        return None

    def sharing(self, parameter: torch.nn.Parameter) -> Sharing:
        """Who else in the replica holds this parameter."""
        return ALONE


class PlainReplica(Replica):
    """One rank: nothing to combine."""

    size = 1

    def combine(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def combine_max(self, values: list[int]) -> list[int]:
        return values


PLAIN = PlainReplica()
_ATTRIBUTE = "_recover_replica"


def mark(model: torch.nn.Module, replica: Replica) -> None:
    """Remember with the model what it was built into."""
    object.__setattr__(model, _ATTRIBUTE, replica)


def is_marked(module: torch.nn.Module) -> bool:
    """Whether this very module was built into a replica."""
    return hasattr(module, _ATTRIBUTE)


def replica_of(model: torch.nn.Module) -> Replica:
    """What the model, or a module inside of it, was built into."""
    return next((getattr(m, _ATTRIBUTE) for m in model.modules() if is_marked(m)), PLAIN)
