"""What a step asks of the inside of a replica: to combine a few numbers over its ranks."""

from __future__ import annotations

from typing import Protocol

import torch


class Replica(Protocol):
    """The inside of a replica."""

    size: int

    def combine(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a small float64 tensor over the replica's ranks, the same on all of them.

        Called by all of them at the same points of every attempt, whatever became of the reduction across replicas:
        a rank that left it out would leave its mates blocked.
        """


class PlainReplica:
    """One rank: nothing to combine."""

    size = 1

    def combine(self, values: torch.Tensor) -> torch.Tensor:
        return values


PLAIN = PlainReplica()
_ATTRIBUTE = "_recover_replica"


def mark(model: torch.nn.Module, replica: Replica) -> None:
    """Remember with the model what it was built into."""
    object.__setattr__(model, _ATTRIBUTE, replica)


def replica_of(model: torch.nn.Module) -> Replica:
    return getattr(model, _ATTRIBUTE, PLAIN)
