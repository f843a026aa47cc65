"""Which members a repair excludes where nobody dies, and still no carrier can be built.

A pure function of the census, which is the same on all members: so all of them exclude the same
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recover.job.grid import Grid
from recover.world.census import Row, broken_links

# Rounds over the same members that a member may fail in before it is excluded.
FAILURES = 3


@dataclass(frozen=True)
class Failing:
    """The ranks to exclude, or why nobody can be: then the world cannot be repaired."""

    ranks: frozenset[int] = frozenset()
    hopeless: str = ""


def failing_members(rows: Mapping[int, Row], grid: Grid) -> Failing:
    """Judge the members by how often each has failed.

    1. A rank that cannot even make a carrier says so itself: it is excluded, however many such ranks there are.
    2. Where building fails, both ends of a connection fail, and the fault may be at neither of them. Joining ranks
       are excluded before any member, because the members had a carrier without them.
    3. If one replica is an end of all broken links, the other replicas reach each other and continue without it.
    4. Otherwise the ranks that failed most often are excluded, but never half of the replicas or more.
    """
    cannot_make = frozenset(rank for rank, row in rows.items() if row.own >= FAILURES)
    if cannot_make:
        if not grid.whole(rows.keys() - cannot_make):
            return Failing(hopeless=f"no replica could make a carrier in {FAILURES} rounds")
        return Failing(cannot_make)
    failures = {rank: row.own + row.built for rank, row in rows.items()}
    most = max(failures.values())
    joining = _joining(rows)
    if most < FAILURES:
        # All have only waited for others: a network may swallow what a joining rank sends.
        waited = max(row.waited for row in rows.values())
        return Failing(joining if waited >= FAILURES else frozenset())
    worst = frozenset(rank for rank, count in failures.items() if count == most)
    if worst & joining:
        return Failing(worst & joining)
    if (alone := _end_of_all_broken_links(rows, grid)) is not None:
        return Failing(frozenset(rank for rank in rows if grid.replica(rank) == alone))
    if 2 * len(grid.replicas_of(worst)) >= len(grid.replicas_of(rows)):
        if joining:
            return Failing(joining)
        return Failing(hopeless=f"half of the replicas or more failed in {FAILURES} rounds")
    return Failing(worst)


def _joining(rows: Mapping[int, Row]) -> frozenset[int]:
    """Ranks that were no members before.

    At the start of a job all are new, and none of them joins.
    """
    new = frozenset(rank for rank, row in rows.items() if not row.epoch)
    return frozenset() if new == rows.keys() else new


def _end_of_all_broken_links(rows: Mapping[int, Row], grid: Grid) -> int | None:
    """The replica without which no link between replicas is broken; of several, the highest number."""
    pairs = {grid.replicas_of(pair) for pair in broken_links(rows)}
    ends = [frozenset(pair) for pair in pairs if len(pair) == 2]
    return max(frozenset[int].intersection(*ends), default=None) if ends else None
