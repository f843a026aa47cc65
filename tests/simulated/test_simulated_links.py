"""Links that break while all ranks live: as few replicas as possible are lost, under schedules in which others die,
join and leave."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from simulated_laws import play
from simulated_schedules import Schedule, elastic_schedule, parted_schedule
from test_simulated_world import explore

from recover.job.grid import Grid
from recover.policy.cover import smallest_cover

SCHEDULES, ELASTIC = 100, 60


@pytest.mark.guarantee(
    "Membership",
    "Any schedule of broken links, deaths, joins and leaves keeps exactly B, exact samples and one membership, and "
    "costs only replicas at the ends of broken links.",
)
def test_schedules_of_broken_links_keep_every_invariant() -> None:
    seen = explore(range(SCHEDULES), parted_schedule)
    assert seen["parted"] > SCHEDULES // 5, seen


@pytest.mark.soak
def test_hundred_thousand_schedules_of_broken_links_keep_every_invariant() -> None:
    explore(range(100_000), parted_schedule)


@pytest.mark.guarantee(
    "Membership",
    "Any schedule of broken links, deaths, joins and leaves keeps exactly B, exact samples and one membership, and "
    "costs only replicas at the ends of broken links.",
)
def test_schedules_of_instalments_leaves_and_broken_links_keep_every_invariant() -> None:
    seen = explore(range(ELASTIC), elastic_schedule)
    assert all(seen[kind] > ELASTIC // 10 for kind in ("parted", "left", "joined")), seen


@pytest.mark.soak
def test_hundred_thousand_schedules_of_instalments_leaves_and_broken_links_keep_every_invariant() -> None:
    explore(range(100_000), elastic_schedule)


@pytest.mark.guarantee(
    "Membership",
    "Where members do not reach each other, the fewest ranks are excluded, joining replicas before members, and all "
    "members choose the same.",
)
@pytest.mark.parametrize("replica_size", [1, 2])
def test_links_broken_at_the_start_cost_the_smallest_cover(replica_size: int) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        grid = Grid(6, replica_size)
        pairs = rng.sample(list(combinations(range(6), 2)), rng.randint(1, 5))
        starts = dict(pairs)  # one link by rank
        links = {low * replica_size: (0, high * replica_size) for low, high in starts.items()}
        played = play(Schedule(seed, grid, links=links, kept=True))
        lost = set(range(6)) - set(grid.replicas_of(played.survivors))
        assert lost == smallest_cover(starts.items(), dict.fromkeys(range(6), replica_size)), (seed, starts)
