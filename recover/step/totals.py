"""Totals: small numbers that are summed over all replicas in one reduction at the end of an
attempt.

A row of float64: loss, weight, hash of the state, checksum of the microbatches' contents, the
sample in each slot, fingerprints of verified gradients, the checksum of the local sums, the pace of
each replica, which replicas leave, changes of running buffers, and which parameters were used.
NumPy, not torch: the simulated world sums them, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from recover.world.carriers.worker import Work
from recover.world.cross_group import CrossGroup

LOSS, WEIGHT, HASH, HASH_SQUARED, CONTENTS, SAMPLES = range(6)
HALF = 1 << 32  # a fingerprint of 64 bits enters as two numbers, each exact in a float64
MODULUS = 1_048_573  # the largest prime below 2^20: squares of it can be summed exactly in a float64

Row = npt.NDArray[np.float64]


class Totals:
    """This rank's contribution, the sum over all replicas, and the sum of the last complete
    attempt (`agreed`)."""

    def __init__(
        self,
        global_batch: int,
        replicas: Sequence[int],
        changes: int,
        checks: int = 0,
        with_checksum: bool = False,
    ) -> None:
        """`checks`: slots that two replicas compute in each step; `with_checksum`: the row has a checksum of
        the local sums."""
        self._global_batch, self._numbers_of_buffers, self._number_of_checks = global_batch, changes, checks
        self._with_checksum = with_checksum
        self.seat(replicas)
        self.agreed: Row = np.zeros(0)
        self._own: Row = np.zeros(0)
        self._sum: Row = np.zeros(0)
        self._work: Work | None = None
        self._epoch: int | None = None

    def seat(self, replicas: Sequence[int]) -> None:
        """Give each of these replicas a place in the row, the same on all ranks. A death does
        not change it, a join does."""
        self._seats = {replica: seat for seat, replica in enumerate(sorted(replicas))}
        # Slots of spares are numbered from B on. There are fewer than B of them, or one for each
        # replica if B is smaller than the number of replicas.
        self._checks = SAMPLES + self._global_batch + max(self._global_batch, len(self._seats))
        # Two halves of the owner's fingerprint and of the shadow's for each check; then three numbers
        # of the check before the first step; then two halves of the checksum.
        self._start = self._checks + 4 * self._number_of_checks
        self._checksum = self._start + (3 if self._number_of_checks else 0)
        self._paces = self._checksum + (2 if self._with_checksum else 0)
        self._leaving = self._paces + len(self._seats)
        self._changes = self._leaving + len(self._seats)
        self._usage = self._changes + self._numbers_of_buffers

    def begin(self, parameters: int) -> None:
        """Begin a step with this number of parameters."""
        if len(self.agreed) != self._usage + parameters:
            self.agreed, self._own = np.zeros((2, self._usage + parameters))
            self._sum = np.zeros_like(self._own)
            self._work = None
        self.forget()

    @property
    def length(self) -> int:
        """Length of the row."""
        return len(self._own)

    def contribute(
        self,
        loss: float,
        weight: float,
        samples: Mapping[int, int],
        changes: npt.ArrayLike,
        usage: npt.ArrayLike,
        not_finite: Collection[int] = (),
        contents: int = 0,
    ) -> None:
        """Set what this replica contributes to the sum; a spare contributes nothing. `not_finite`:
        slots whose loss is not finite; `contents`: the sum of the 32-bit checksums of its
        microbatches, exact in any order."""
        self._own[[LOSS, WEIGHT, CONTENTS]] = loss, weight, contents
        for slot, sample in samples.items():
            # Counted from 1: 0 is a slot that was not run. Negative: its loss is not finite.
            self._own[SAMPLES + slot] = -(sample + 1) if slot in not_finite else sample + 1
        self._own[self._changes : self._usage] = changes
        self._own[self._usage :] = usage

    def clear(self) -> None:
        self._own[:] = 0.0

    def say(self, fingerprint: int, replica: int, pace: float | None = None, leaves: bool = False) -> None:
        """Set what every replica reports, a spare as well: the hash of its state, seconds per
        microbatch, and whether it leaves after this step."""
        self._own[[HASH, HASH_SQUARED]] = on_the_wire(fingerprint)
        self._own[self._leaving + self._seats[replica]] = leaves
        if pace is not None:
            # Whole microseconds: sums of them over the ranks of a replica are exact in any order, so all ranks of
            # all replicas have the same bits.
            self._own[self._paces + self._seats[replica]] = max(1, round(pace * 1e6))

    def say_checks(self, said: Sequence[tuple[int, int | None, int | None]], start: int | None) -> None:
        """Set the fingerprints of verified gradients: the number of a check, the result as its owner
        and the result as its shadow; and the digest of the check before the first step, if this rank
        has run it."""
        for number, *results in said:
            for place, value in enumerate(results):
                if value is not None:
                    at = self._checks + 4 * number + 2 * place
                    # Counted from 1: 0 is a result that is missing.
                    self._own[[at, at + 1]] = value // HALF + 1, value % HALF
        if start is not None:
            self._own[self._start : self._checksum] = 1.0, *on_the_wire(start)

    def say_checksum(self, value: int) -> None:
        """Set the checksum of what this replica has added to its local sums."""
        self._own[self._checksum : self._paces] = value // HALF, value % HALF

    @property
    def checksum(self) -> int:
        """The sum of the checksums of all replicas in the last complete attempt, modulo 2^64."""
        high, low = self.agreed[self._checksum : self._paces]
        return (int(high) * HALF + int(low)) % HALF**2

    def checked(self) -> list[tuple[int | None, int | None]]:
        """For each check of the last complete attempt, the results of its owner and its shadow;
        None: missing."""
        row = self.agreed[self._checks : self._checks + 4 * self._number_of_checks].reshape(-1, 2, 2)
        return [tuple(int(a - 1) * HALF + int(b) if a else None for a, b in pair) for pair in row.tolist()]  # type: ignore[misc]

    def same_start(self) -> bool:
        """Whether the check before the first step had the same results on all replicas that ran it."""
        replicas, total, squares = self.agreed[self._start : self._checksum]
        return all_equal(total, squares, int(replicas))

    def post(self, cross: CrossGroup, epoch: int) -> Work:
        self._epoch = epoch
        self._work = cross.all_reduce(self._own, self._sum)
        return self._work

    def reduced_under(self, epoch: int) -> bool:
        """Whether the sum is over the members of this epoch: a sum of an earlier epoch may lack
        a member, or hold a dead one."""
        return self._epoch == epoch and self._work is not None and self._work.ok

    def forget(self) -> None:
        """Begin an attempt: earlier reductions do not count."""
        if self._work is not None and not self._work.ok:
            # New memory: the library may still write to the buffer of an aborted reduction.
            self._sum = np.zeros_like(self._own)
        self._epoch, self._work = None, None

    @property
    def samples_summed(self) -> int:
        """Number of slots with a sample in the sum of this attempt."""
        return int((self._sum[SAMPLES : self._checks] != 0).sum())

    @property
    def number_of_rows(self) -> int:
        """The length of `rows_of_replica`."""
        return 2 + self._usage - self._paces

    def rows_of_replica(self) -> Row:
        """Loss, weight, paces, leaving replicas and changes in the sum of this attempt: each rank of a
        replica has those of its own rows, and of a replica that spans hosts only the ranks of one host
        may know that it leaves."""
        return np.concatenate([self._sum[[LOSS, WEIGHT]], self._sum[self._paces : self._usage]])

    def agree(self, rows: Row) -> None:
        """Keep the sum of an attempt that is complete; `rows`: `rows_of_replica`, combined over the ranks
        of the replica."""
        self.agreed[:] = self._sum
        self.agreed[[LOSS, WEIGHT]] = rows[:2]
        self.agreed[self._paces : self._usage] = rows[2:]

    def same_state(self, replicas: int, of_attempt: bool = False) -> bool:
        """Whether all replicas reported the same hash."""
        total, squares = (self._sum if of_attempt else self.agreed)[[HASH, HASH_SQUARED]]
        return all_equal(total, squares, replicas)

    @property
    def loss(self) -> float:
        return float(self.agreed[LOSS])

    @property
    def weight(self) -> float:
        return float(self.agreed[WEIGHT])

    @property
    def contents(self) -> int:
        """The sum of the checksums of all microbatches; 0 if none of them holds a tensor."""
        return int(self.agreed[CONTENTS])

    @property
    def samples(self) -> list[int]:
        """Samples in the sum over all replicas."""
        numbers = np.abs(self.agreed[SAMPLES : self._checks])
        return sorted(int(number) - 1 for number in numbers[numbers > 0])

    @property
    def samples_not_finite(self) -> list[int]:
        """Samples whose loss is not finite. In a sharded replica: on the rows of this shard."""
        numbers = self.agreed[SAMPLES : self._checks]
        return sorted(int(-number) - 1 for number in numbers[numbers < 0])

    @property
    def paces(self) -> dict[int, float]:
        """Seconds per microbatch of each replica that ran any in this step: the mean over its
        ranks, without the time to fill a pipeline. The same on all ranks of all replicas."""
        paces: list[float] = self.agreed[self._paces : self._leaving].tolist()
        return {replica: paces[seat] / 1e6 for replica, seat in self._seats.items() if paces[seat] > 0}

    @property
    def leaving(self) -> set[int]:
        """Replicas of which a rank leaves after this step."""
        return {replica for replica, seat in self._seats.items() if self.agreed[self._leaving + seat] > 0}

    @property
    def changes(self) -> Row:
        """Changes of running buffers, summed over the step's microbatches."""
        return self.agreed[self._changes : self._usage]

    @property
    def used(self) -> npt.NDArray[Any]:
        """For each parameter, whether any replica has used it: the same on all replicas."""
        return self.agreed[self._usage :] > 0


def on_the_wire(value: int) -> tuple[float, float]:
    """The two numbers by which a hash enters a sum, so that `all_equal` can tell whether all
    replicas have the same."""
    small = value % MODULUS
    return float(small), float(small * small)


def all_equal(total: float, total_of_squares: float, replicas: int) -> bool:
    """The square of a sum equals the number of terms times the sum of squares only if all terms
    are equal."""
    return int(total) ** 2 == replicas * int(total_of_squares)
