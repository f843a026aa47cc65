"""Drift: which replicas hold a wrong state. A pure function of the census, so all members decide
alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from recover.job.grid import Grid
from recover.step.record import Record


@dataclass(frozen=True)
class DriftVerdict:
    """The replicas to evict; or, without a majority that counts, the replicas of each state."""

    evicted: frozenset[int] = frozenset()
    # If undecided: the replicas of each state, that of the oldest replica first, and why it is
    # undecided.
    states: tuple[tuple[int, ...], ...] = ()
    why: str = ""
    # For each replica that differs: one of its ranks that does, and a rank of the same shard with
    # the other state.
    compared: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def judge(grid: Grid, records: Mapping[int, Record]) -> DriftVerdict:
    """A state is right if more than half of the replicas that count hold it. Shards are compared
    one by one.

    A majority does not count if all of its replicas joined later than the oldest replica with
    another state: they have their state from older replicas, and whatever they did not receive
    makes them differ together.
    """
    compared: dict[int, tuple[int, int]] = {}
    why = ""
    for shard in range(grid.replica_size):
        ranks = {grid.replica(rank): rank for rank in sorted(records) if grid.shard(rank) == shard}
        held = {replica: records[rank].fingerprint for replica, rank in ranks.items()}
        if len(set(held.values())) < 2:
            continue
        since = {replica: records[rank].since for replica, rank in ranks.items()}
        voters = [replica for replica in held if records[ranks[replica]].counts] or list(held)
        (majority, count), *_ = Counter(held[replica] for replica in voters).most_common()
        holders = [replica for replica in voters if held[replica] == majority]
        others = [replica for replica in voters if held[replica] != majority]
        if 2 * count <= len(voters):
            why = why or "there is no majority to tell which state is right"
        elif others and min(since[r] for r in others) < min(since[r] for r in holders):
            why = why or (
                f"{named(holders)} joined later and got their state from the others, so their number does not "
                "tell which state is right"
            )
        for replica, value in held.items():
            if value != majority:
                compared.setdefault(replica, (ranks[replica], ranks[holders[0]]))
    if not why:
        return DriftVerdict(frozenset(compared), compared=compared)
    states = _states(grid, records)
    return DriftVerdict(states=states, why=why, compared=_against_first(grid, records, states))


def _states(grid: Grid, records: Mapping[int, Record]) -> tuple[tuple[int, ...], ...]:
    """Replicas grouped by the state of all of their ranks; the oldest first."""
    whole: dict[int, tuple[int, ...]] = {}
    since: dict[int, int] = {}
    for rank in sorted(records):
        replica, record = grid.replica(rank), records[rank]
        whole[replica] = (*whole.get(replica, ()), record.fingerprint)
        since[replica] = record.since
    states: dict[tuple[int, ...], list[int]] = {}
    for replica in sorted(whole, key=lambda replica: (since[replica], replica)):
        states.setdefault(whole[replica], []).append(replica)
    return tuple(tuple(sorted(replicas)) for replicas in states.values())


def _against_first(
    grid: Grid, records: Mapping[int, Record], states: tuple[tuple[int, ...], ...]
) -> dict[int, tuple[int, int]]:
    """For one replica of each other state: a rank that differs from the first state, and its
    counterpart."""
    ranks = {(grid.replica(rank), grid.shard(rank)): rank for rank in records}
    found: dict[int, tuple[int, int]] = {}
    for replicas in states[1:]:
        for shard in range(grid.replica_size):
            here, there = ranks[replicas[0], shard], ranks[states[0][0], shard]
            if records[here].fingerprint != records[there].fingerprint:
                found.setdefault(replicas[0], (here, there))
    return found


def named(numbers: Collection[int]) -> str:
    """Replicas in words: `replica 2`, `replicas 0, 3`."""
    return f"replica{'s' if len(numbers) > 1 else ''} {', '.join(map(str, sorted(numbers)))}"
