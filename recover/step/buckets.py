"""Gradient buckets: flat sums that can be reduced across replicas and, if that went wrong, reduced again.

A bucket has a local sum, which holds the microbatches of this replica, and a result, which holds the sum over all
replicas. Out of place (the default) they are two tensors, so nothing ever has to be restored. In place, for
gradients that somebody else owns, they are one, and a snapshot is kept to rewind from.
"""

from __future__ import annotations

import torch

from recover.carriers.worker import Work
from recover.policy import SlotSet
from recover.world.cross import CrossGroup


class Bucket:
    """One flat piece of the gradient, and its ledger: the slots in it, what it was reduced with, and when."""

    def __init__(self, local: torch.Tensor, in_place: bool = False, copies: int = 1) -> None:
        self.local = local
        self.copies = copies  # ranks of the replica that hold the same bucket
        self.result = local if in_place else torch.empty_like(local)
        self.snapshot: torch.Tensor | None = None
        self.held = SlotSet()  # the slots of this step that are in the local sum
        self.posted: SlotSet | None = (
            None  # those that were when it was handed over; None: not in this attempt
        )
        self._in_place = in_place
        self._work: Work | None = None
        self._epoch: int | None = None

    def post(self, cross: CrossGroup, epoch: int, contribute: bool) -> Work:
        """Hand the bucket to the communication thread. A spare takes part and contributes zeros."""
        self._epoch, self.posted = epoch, self.held
        if self._in_place:
            if self.snapshot is None:
                self.snapshot = torch.empty_like(self.local)
            self.snapshot.copy_(self.local)
            if not contribute:
                self.local.zero_()
            self._work = cross.all_reduce(self.local)
        elif contribute:
            self._work = cross.all_reduce(self.local, self.result)
        else:
            self.result.zero_()
            self._work = cross.all_reduce(self.result)
        return self._work

    def reduced_under(self, epoch: int) -> bool:
        """Whether the result is the sum over the members of this epoch. Stale results are never mixed in."""
        return self._epoch == epoch and self._work is not None and self._work.ok

    def rewind(self) -> None:
        """Make the local sum what it was before it was reduced."""
        if self._in_place and self._epoch is not None:
            assert self.snapshot is not None
            self.local.copy_(self.snapshot)
        self.forget()

    def forget(self) -> None:
        """A new step, or a new attempt: whatever was reduced before does not count."""
        if self._work is not None and not self._work.ok and not self._in_place:
            # The library may still write to a result it gave up. The world keeps it for as long as that may happen.
            self.result = torch.empty_like(self.local)
        self._epoch, self._work, self.posted = None, None, None
