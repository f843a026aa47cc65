"""Maxima: codes of the largest values of an attempt over all replicas, which decide whether its
sums are exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recover.gradients.exponents import NOT_FINITE, ZERO, Codes, Exponents
from recover.world.carriers.worker import Work
from recover.world.cross_group import CrossGroup

if TYPE_CHECKING:
    from recover.gradients.replica_interface import Replica


class Maxima:
    """One reduction of int32, next to that of the totals; none where sums are fast (`exponents`
    is None)."""

    def __init__(self, exponents: Exponents | None) -> None:
        self._exponents = exponents
        self._row: Codes = np.zeros(0, np.int32)
        self._work: Work | None = None
        self._epoch: int | None = None
        self.agreed: Codes = np.zeros(0, np.int32)  # codes of the last complete attempt

    @property
    def length(self) -> int:
        """Numbers in the row; 0 where sums are fast."""
        return self._exponents.size + 2 * len(self._exponents.digest) if self._exponents is not None else 0

    def post(self, cross: CrossGroup, epoch: int, codes: Codes | None) -> None:
        """Start the reduction. `codes`: of what this replica contributes; None if it contributes nothing."""
        self._epoch = epoch
        if self._exponents is None:
            return
        if codes is None:
            codes = np.full(self._exponents.size, ZERO, np.int32)
        # The maxima of a digest and of its negative show whether all replicas have rounded to the
        # same grids. Each attempt has a new row: the library may still write to the row of an
        # aborted reduction.
        digest = np.array(self._exponents.digest, np.int32)
        self._row = np.concatenate([codes, digest, -digest]).astype(np.int32)
        self._work = cross.all_max(self._row)

    def reduced_under(self, epoch: int) -> bool:
        """Whether these are the maxima over the members of this epoch."""
        if self._exponents is None:
            return True
        return self._epoch == epoch and self._work is not None and self._work.ok

    def combine(self, replica: Replica, complete: bool) -> bool:
        """The maxima over the ranks of the replica. False if replicas have rounded to different
        grids.

        Called by all ranks of the replica at the same point of every attempt, also of those that
        are not complete.
        """
        if self._exponents is None:
            return True
        row = np.array(replica.combine_max(self._row.tolist()), np.int32)
        if not complete:
            return True
        digest, size = self._exponents.digest, self._exponents.size
        self.agreed, digests = row[:size], row[size:]
        return bool((digests == [*digest, *(-part for part in digest)]).all())

    @property
    def finite(self) -> bool:
        return bool((self.agreed != NOT_FINITE).all())

    @property
    def fit(self) -> bool:
        """Whether the attempt was summed with the right exponents."""
        return self._exponents is None or self._exponents.fit(self.agreed)

    def rerun(self) -> None:
        """Choose the exponents of a rerun: all replicas have agreed that the present ones do not fit."""
        assert self._exponents is not None
        self._exponents.rerun(self.agreed)

    @property
    def reruns(self) -> int:
        """How often the step in progress was run again."""
        return self._exponents.reruns if self._exponents is not None else 0

    def take_warning(self) -> str:
        return self._exponents.take_warning() if self._exponents is not None else ""

    def commit(self) -> None:
        if self._exponents is not None:
            self._exponents.commit(self.agreed)
