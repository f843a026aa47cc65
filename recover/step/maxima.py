"""Maxima: codes of the largest values of an attempt over all replicas, which decide whether its
sums are exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from recover.gradients.exponents import NOT_FINITE, ZERO, Exponents
from recover.world.carriers.worker import Work
from recover.world.cross_group import CrossGroup

if TYPE_CHECKING:
    from recover.gradients.replica_interface import Replica


class Maxima:
    """One reduction of int32, next to that of the totals; none where sums are fast (`exponents`
    is None)."""

    def __init__(self, exponents: Exponents | None) -> None:
        self._exponents = exponents
        self._row: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._work: Work | None = None
        self._epoch: int | None = None
        self.agreed: tuple[int, ...] = ()  # codes of the last complete attempt

    def post(self, cross: CrossGroup, epoch: int, codes: Sequence[int] | None) -> None:
        """`codes`: of what this replica contributes; None if it contributes nothing."""
        self._epoch = epoch
        if self._exponents is None:
            return
        current = self._exponents.current
        codes = [ZERO] * len(current) if codes is None else codes
        # The maxima of exponents and of their negatives show whether all replicas have rounded to
        # the same grid. Each attempt has a new row: the library may still write to the row of an
        # aborted reduction.
        self._row = np.array([*codes, *current, *(-exponent for exponent in current)], np.int32)
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
        codes, highest, negated_lowest = np.split(np.array(replica.combine_max(self._row.tolist())), 3)
        if not complete:
            return True
        self.agreed = tuple(codes.tolist())
        current = self._exponents.current
        return tuple(highest.tolist()) == current and tuple((-negated_lowest).tolist()) == current

    @property
    def finite(self) -> bool:
        return NOT_FINITE not in self.agreed

    @property
    def fit(self) -> bool:
        """Whether the attempt was summed with the right exponents."""
        return self._exponents is None or self._exponents.fit(self.agreed)

    def rerun(self) -> None:
        """All replicas have agreed that the exponents do not fit."""
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
