"""Checked sums: with `verify` and reproducible sums, checksums show whether gradients were added and
reduced without an error.

Each rank keeps a checksum of the words that it adds to its local sums. The totals sum these, and
each rank compares the checksum of its reduced sums with that total before it votes. Nothing is
computed again to find the cause:

1. The local sums of a rank do not have the checksum of what was added to them: its replica has
   erred, and is evicted.
2. All local sums are right: an error came up while they were reduced. They are reduced again.
3. The reduced sums of one replica are wrong for the third time in a step, and those of others are
   right: that replica is evicted. If those of several are wrong, the cause cannot be assigned to
   one replica, and the run ends.

`judge` is a pure function of the census, so all members decide alike. This module does not import
torch: the simulated world runs it, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from recover.gradients.deferred import DeviceValue, now
from recover.job.grid import Grid
from recover.runs.records.kinds import WRONG_SUM
from recover.step.drift import named
from recover.step.record import Record
from recover.step.verification import host_of

TRIES = 3  # reductions of one step with a wrong result on the same rank


class CheckedSums(Protocol):
    """Local and reduced sums with checksums."""

    @property
    def checksum_added(self) -> int | DeviceValue[int]:
        """The checksum of all words that were added to the local sums of this step."""

    def checksum_of(self, which: Literal["local", "result"]) -> int | None:
        """The checksum of the local sums, or of the reduced ones; None if they hold a number that is
        no integer."""


@dataclass(frozen=True)
class SumVerdict:
    """The verdict on the checksums in the records of a census."""

    evicted: Mapping[int, str] = field(default_factory=dict)  # replicas that erred, and how it was found
    error: str = ""  # why no replica can go on


class SumCheck:
    """The checks of one rank. `sums`: None if they are not checked."""

    def __init__(self, sums: CheckedSums | None = None) -> None:
        self._sums = sums
        self._added: int | DeviceValue[int] = 0

    @property
    def is_on(self) -> bool:
        return self._sums is not None

    def read(self) -> list[int | DeviceValue[int]]:
        """Take the checksum of what was added to the local sums, once they hold all microbatches of an
        attempt. Returns values that may still be on a device."""
        self._added = self._sums.checksum_added if self._sums is not None else 0
        return [self._added]

    @property
    def added(self) -> int:
        return now(self._added)

    def result_is_right(self, total: int) -> bool:
        """Whether the reduced sums have the checksum `total`: those of all replicas, summed."""
        return self._sums is None or self._sums.checksum_of("result") == total

    def local_is_right(self) -> bool:
        return self._sums is None or self._sums.checksum_of("local") == self.added


def judge(grid: Grid, records: Mapping[int, Record]) -> SumVerdict:
    """The verdict on the sums of an attempt, as the members have found them."""
    members = {grid.replica(rank) for rank in records}
    damaged = [rank for rank, record in records.items() if record.damaged]
    lasting = [rank for rank, record in records.items() if record.wrong_sums >= TRIES]
    if damaged:
        how = "it does not hold what was added to it"
    elif len(grid.replicas_of(lasting)) == 1 and len(members) > 1:
        how = f"it was wrong after {TRIES} reductions, and that of others was right"
    elif lasting:
        return SumVerdict(
            error=f"the reduced sums of {named(grid.replicas_of(lasting))} were wrong after {TRIES} reductions "
            f"({', '.join(names_of(lasting, records))}), although the sums of each replica were right before; nothing "
            "of this step was committed. A device or a link that takes part in the reductions changes data: check "
            "them, and resume from the last checkpoint"
        )
    else:
        return SumVerdict()
    found = damaged or lasting
    reasons = {
        replica: f"{WRONG_SUM} is wrong: {how} "
        f"({', '.join(names_of([rank for rank in found if grid.replica(rank) == replica], records))})"
        for replica in grid.replicas_of(found)
    }
    if len(reasons) < len(members):
        return SumVerdict(reasons)
    told = "; ".join(f"replica {replica}: {why}" for replica, why in reasons.items())
    return SumVerdict(
        error=f"no replica is left whose sums are right ({told}); nothing of this step was committed. Check the "
        "devices, and resume from the last checkpoint on others"
    )


def names_of(ranks: Collection[int], records: Mapping[int, Record]) -> list[str]:
    """Each of these ranks in words: `rank 3 on HOST`."""
    hosts = {rank: host_of(records[rank].evidence) for rank in sorted(ranks)}
    return [f"rank {rank} on {host}" if host else f"rank {rank}" for rank, host in hosts.items()]
