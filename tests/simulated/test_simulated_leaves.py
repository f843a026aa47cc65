"""Hosts that are asked to leave, at any moment of a run in which others die and join."""

from __future__ import annotations

import pytest
from simulated_laws import play
from simulated_schedules import BATCH, Schedule, noticed_schedule
from test_simulated_world import explore

from recover.job.grid import Grid

SCHEDULES = 150


@pytest.mark.guarantee(
    "Leaving",
    "Any schedule of leaves, joins and deaths keeps exactly B, exact samples, one membership and an unbroken "
    "sequence of steps, and no rank ends because another one leaves.",
)
def test_schedules_of_leaves_joins_and_deaths_keep_every_invariant() -> None:
    seen = explore(range(SCHEDULES), noticed_schedule)
    assert seen["left"] > SCHEDULES // 3, seen
    assert min(seen[how] for how in ("joined", "killed", "stayed although noticed")) > 5, seen


@pytest.mark.soak
def test_hundred_thousand_schedules_with_leaves_keep_every_invariant() -> None:
    explore(range(100_000), noticed_schedule)


@pytest.mark.guarantee("Leaving", "No microbatch is computed again because a replica leaves on notice.")
def test_no_microbatch_is_computed_again_for_a_leave() -> None:
    """All replicas together compute B microbatches in every step, whichever replicas leave, after any call."""
    left = 0
    for seed in range(40):
        replica_size = 1 + seed % 2
        grid = Grid(3 + seed % 3, replica_size)
        notices = dict.fromkeys(range(seed % grid.ranks, grid.ranks, 3), 7 * seed % 60)
        played = play(Schedule(seed, grid, notices=notices, kept=True))
        left += "left" in played.simulation.dead.values()
        last = max(step for rank in played.survivors for step in played.diaries[rank].commits)
        computed = sum(diary.computed for diary in played.diaries)
        assert computed == last * BATCH * replica_size, seed
    assert left > 20


@pytest.mark.guarantee("Leaving", "If all hosts are asked to leave, all replicas stop after the same step.")
def test_all_replicas_stop_together_if_all_are_asked_to_leave() -> None:
    for seed in range(10):
        played = play(Schedule(seed, Grid(3), notices=dict.fromkeys(range(3), 4 + seed), kept=True))
        survivors = {rank: max(played.diaries[rank].commits) for rank in played.survivors}
        assert len(set(survivors.values())) == 1, seed


def test_join_and_leave_of_one_boundary_do_not_mix() -> None:
    """A replica leaves its step early and begins it again, after a boundary at which a second one left on notice and a
    third asked to join. It must not enter an admission that the others have put off."""
    faults = {"leaves": {0: 3}, "notices": {3: 13}, "joins": {3: 13, 5: 43}}
    play(Schedule(1201, Grid(3), kept=True, **faults))
    play(
        Schedule(1631, Grid(4), kills={2: 3}, leaves={1: 2}, notices={3: 19}, joins={4: 65, 5: 20}, kept=True)
    )


@pytest.mark.guarantee(
    "Leaving",
    "A replica that is asked to leave while it joins in instalments leaves at the next vote, and no microbatch is "
    "computed again.",
)
def test_joining_replica_leaves_at_the_next_vote_without_repeated_work() -> None:
    """The replica has one or two ranks, of which one gets the notice. The members commit the step of that vote
    unchanged."""
    left = 0
    for seed in range(40):
        grid = Grid(2, 1 + seed % 2)
        notices = {grid.ranks + seed % grid.replica_size: 9 + 2 * seed}
        played = play(Schedule(seed, grid, joins={2: seed % 7}, notices=notices, kept=True, instalments=True))
        last = max(step for rank in played.survivors for step in played.diaries[rank].commits)
        assert sum(diary.computed for diary in played.diaries) == last * BATCH * grid.replica_size, seed
        ends = {played.simulation.dead.get(rank) for rank in range(grid.ranks, 3 * grid.replica_size)}
        held = any(played.diaries[rank].commits for rank in range(grid.ranks, 3 * grid.replica_size))
        left += ends == {"left"} and not held
    assert left > 10
