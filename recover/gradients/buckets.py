"""Gradient buckets: flat sums that can be reduced across replicas and, if the reduction failed,
reduced again.

A bucket has a local sum of the microbatches of this replica, and a result, the sum over all
replicas. Out of place (the default) they are two tensors, so nothing has to be restored. In
place, for gradients that another library owns, they are one tensor, and a snapshot is kept to
rewind to. Tensors or NumPy arrays: this module does not import torch, so the simulated world
uses the same buckets.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recover.policy import SlotSet
from recover.world.carriers.device_streams import hold_back
from recover.world.carriers.worker import Work
from recover.world.cross_group import CrossGroup


class Bucket:
    """One flat piece of the gradient, with the slots in its local sum and the epoch of its
    reduction."""

    def __init__(self, local: Any, in_place: bool = False, copies: int = 1, part: int = 0) -> None:
        self.local = local
        self.copies = copies  # ranks of the replica that hold the same bucket
        self.part = part  # number of the part of the gradient that it is clipped with
        self.result = local if in_place else _empty_like(local)
        self.snapshot: Any = None
        self.held = SlotSet()  # slots of this step in the local sum
        # Slots that were in it when it was posted; None: not posted in this attempt.
        self.posted: SlotSet | None = None
        self._spare: Any = None
        self._in_place = in_place
        self._work: Work | None = None
        self._epoch: int | None = None

    def post(self, cross: CrossGroup, epoch: int, contribute: bool) -> Work:
        """Post the reduction to the communication thread. A spare takes part and contributes
        zeros."""
        self._epoch, self.posted = epoch, self.held
        if self._in_place:
            if self.snapshot is None:
                self.snapshot = _empty_like(self.local)
            self.snapshot[:] = self.local
            if not contribute:
                self.local[:] = 0
            self._work = cross.all_reduce(self.local)
        elif contribute:
            self._work = cross.all_reduce(self.local, self.result)
        else:
            self.result[:] = 0
            self._work = cross.all_reduce(self.result)
        return self._work

    def reduced_under(self, epoch: int) -> bool:
        """Whether the result is the sum over the members of this epoch: a result of an earlier
        epoch is stale."""
        return self._epoch == epoch and self._work is not None and self._work.ok

    def is_coming(self) -> bool:
        """Whether the bucket was reduced, or is queued on a device. In the latter case this thread's
        stream waits for the result, so that operations that this thread queues next find it."""
        if self._work is None:
            return False
        passed = self._work.behind()
        if passed is None:
            return self._work.ok
        hold_back(self.result, passed)
        return True

    def give_away(self) -> None:
        """Leave the memory of the result to a caller that keeps it, and use new memory."""
        self.result = _empty_like(self.local)

    def rewind(self) -> None:
        """Restore the local sum from before the reduction."""
        if self._in_place and self._epoch is not None:
            assert self.snapshot is not None
            self.local[:] = self.snapshot
        self.forget()

    def forget(self) -> None:
        """Begin an attempt: earlier reductions do not count."""
        if self._work is not None and not (self._work.ok or self._work.refused or self._in_place):
            # The library may still write to the result of an aborted reduction until all ranks have
            # passed another agreement. All have done so when the next reduction fails, so two results in
            # turns are enough. A new allocation each time would fragment the heap.
            spare = _empty_like(self.local) if self._spare is None else self._spare
            self.result, self._spare = spare, self.result
        self._epoch, self._work, self.posted = None, None, None


def _empty_like(array: Any) -> Any:
    return array.new_empty(array.shape) if hasattr(array, "new_empty") else np.empty_like(array)
