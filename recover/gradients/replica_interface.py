"""The replica interface: what a step needs from the ranks of one replica (combining numbers,
shared parameters)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Partners(Protocol):
    """Ranks of a replica that hold the same parameter, each with a part of its gradient. One
    object per group."""

    size: int

    def add_up(self, sums: torch.Tensor) -> None:
        """Sum over the partners in place: the same bits on all of them."""


@dataclass(frozen=True)
class Sharing:
    """How a parameter is held by the ranks of a replica."""

    copies: int = 1  # ranks that hold the same values: they count once in the norm of the gradient
    partners: Partners | None = None  # ranks whose gradients are added to this rank's


ALONE = Sharing()


class Replica(Protocol):
    """The ranks of one replica, as a step sees them."""

    size: int
    # Whether each rank computes rows with the whole model, not with a part of it.
    peers_hold_all_buffers: bool = True
    # Time of a round in addition to its microbatches, in microbatches: that of filling a pipeline.
    fill: float = 0.0

    def combine(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a small float64 tensor over the replica's ranks, the same on all of them.

        All ranks call it at the same points of every attempt, whether the reduction across replicas
        succeeded or not: a rank that left it out would leave its peers blocked.
        """

    def combine_numbers(self, values: list[float]) -> list[float]:
        """The same for a list of numbers."""
        combined: list[float] = self.combine(torch.tensor(values, dtype=torch.float64)).tolist()
        return combined

    def combine_max(self, values: list[int]) -> list[int]:
        """The maximum over the replica's ranks, element by element; under the same rules as
        `combine`."""
        raise NotImplementedError

    def names_of_all(self, names: list[str]) -> list[str]:
        """The names of the parameters that any rank of the replica holds, in the same order on all
        of them; `names`: those of this rank's parameters."""
        return names

    def reshard(self) -> None:
        """Reshard parameters that an evaluation has left gathered: the optimizer needs the
        shards."""
        return

    def knows(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the replica's ranks sum the gradient of this parameter."""
        return True

    def seed_with(self, seed: Callable[[int, int], None]) -> None:
        """Set the function that seeds a microbatch of a round, by its number and the stage of
        this rank."""
        return

    def weights_of_round(self) -> list[float] | None:
        """Weights with which a pipeline ran the backward passes of the last round, returned
        once; None if `Step` runs them."""
        return None

    def sharing(self, parameter: torch.nn.Parameter) -> Sharing:
        """How the ranks of the replica share this parameter."""
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
    """Attach the replica to the model that was built for it."""
    object.__setattr__(model, _ATTRIBUTE, replica)


def is_marked(module: torch.nn.Module) -> bool:
    """Whether a replica is attached to this module itself."""
    return hasattr(module, _ATTRIBUTE)


def replica_of(model: torch.nn.Module) -> Replica:
    """The replica that is attached to the model or to a module inside of it."""
    return next((getattr(m, _ATTRIBUTE) for m in model.modules() if is_marked(m)), PLAIN)
