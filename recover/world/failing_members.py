"""Which members a repair excludes if no rank dies, and still no carrier can be built.

A pure function of the census, which is the same on all members: so all of them exclude the same
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from recover.job.grid import Grid
from recover.policy.cover import smallest_cover
from recover.world.census import BROKEN_LINK, Row, broken_links, is_arrival

# Rounds over the same members that a member may fail in before it is excluded.
FAILURES = 3


@dataclass(frozen=True)
class Failing:
    """The ranks to exclude, or `hopeless`: why no rank can be excluded, so that the world cannot be
    repaired."""

    ranks: frozenset[int] = frozenset()
    hopeless: str = ""
    reasons: Mapping[int, str] = field(default_factory=dict)  # by replica, if links are broken


def failing_members(rows: Mapping[int, Row], grid: Grid) -> Failing:
    """Judge the members by how often each has failed.

    1. A rank that cannot even make a carrier says so itself: it is excluded, however many such ranks there are.
    2. If members do not reach each other, the smallest set of replicas is excluded without which all others do, joining
       replicas first (`recover.policy.cover`).
    3. Where building fails, both ends of a connection fail, and the fault may be at neither of them. Joining ranks
       are excluded before any member, because the members had a carrier without them.
    4. Otherwise the ranks that failed most often are excluded, but never half of the member replicas or more: joining
       replicas do not hold the state.
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
    if links := broken_links(rows):
        return _without_broken_links(rows, grid, links, joining)
    worst = frozenset(rank for rank, count in failures.items() if count == most)
    if worst & joining:
        return Failing(worst & joining)
    if 2 * len(grid.replicas_of(worst)) >= len(grid.replicas_of(rows.keys() - joining)):
        if joining:
            return Failing(joining)
        return Failing(hopeless=f"half of the replicas or more failed in {FAILURES} rounds")
    return Failing(worst)


def _joining(rows: Mapping[int, Row]) -> frozenset[int]:
    """Ranks that do not hold the state: they were not in the group before, or are given the state in instalments.

    At the start of a job all are new, and none of them joins.
    """
    new = frozenset(rank for rank, row in rows.items() if not row.epoch or is_arrival(row.record))
    return frozenset() if new == rows.keys() else new


def _without_broken_links(
    rows: Mapping[int, Row], grid: Grid, links: frozenset[tuple[int, int]], joining: frozenset[int]
) -> Failing:
    pairs = {(grid.replica(low), grid.replica(high)) for low, high in links}
    weights = dict.fromkeys(grid.replicas_of(rows), grid.replica_size)
    cover = smallest_cover(pairs, weights, grid.replicas_of(joining))
    reasons = {
        replica: f"{BROKEN_LINK} {_others(replica, links, grid)}; the others reach each other without it"
        for replica in sorted(cover)
    }
    return Failing(frozenset(rank for rank in rows if grid.replica(rank) in cover), reasons=reasons)


def _others(replica: int, links: frozenset[tuple[int, int]], grid: Grid) -> str:
    """The ranks that do not reach a rank of the replica, or that it does not reach."""
    ranks = sorted({rank for link in links for rank in link if replica in map(grid.replica, link)})
    others = [rank for rank in ranks if grid.replica(rank) != replica]
    return f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
