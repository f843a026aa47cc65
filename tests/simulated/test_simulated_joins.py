"""Replicas that come, under schedules in which anybody dies at any moment; and agreements that are kept, as etcd's are,
by ranks that are cut off or declared dead while they live."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from simulated_laws import REMOVED, Played, play
from simulated_schedules import (
    BATCH,
    Schedule,
    aimed_join_schedule,
    joining_schedule,
    kept_schedule,
)
from simulated_training import Training
from test_simulated_world import explore

from recover.faults.locations import JOIN_PHASES, REPAIR_PHASES
from recover.job.grid import Grid
from recover.step.joining.parcel import Parcel

KEPT, JOINING, AIMED, TRAINED = 100, 120, 80, 10


@pytest.mark.guarantee(
    "Joining",
    "A rank that was declared dead never commits where decisions are persisted, whether it is isolated or "
    "slow.",
)
def test_declared_dead_rank_never_commits_under_persisted_decisions() -> None:
    """Partitions, slowness, stops and deaths: what anybody has committed, the dead included, all have alike."""
    seen = explore(range(KEPT), kept_schedule)
    assert min(seen[how] for how in ("killed", "orphan", "declared")) > 5, seen


@pytest.mark.guarantee(
    "Joining",
    "Any schedule of joins and deaths keeps exactly B, exact samples, one membership and an unbroken "
    "sequence of steps.",
)
def test_schedules_of_joins_and_deaths_keep_every_invariant() -> None:
    seen = explore(range(JOINING), joining_schedule)
    assert seen["joined"] > JOINING // 3, seen
    assert (
        min(seen[how] for how in ("joined and lost in one repair", "declared", "unneeded", "killed")) > 5
    ), seen


@pytest.mark.guarantee("Joining", "A death during a join is handled like any other death.")
def test_death_at_every_location_of_a_join_is_an_ordinary_death() -> None:
    seen = explore(range(AIMED), aimed_join_schedule)
    assert min(seen[f"at repair:{phase}"] for phase in (*REPAIR_PHASES, *JOIN_PHASES)) > 3, seen
    assert seen["joined"] > AIMED // 3, seen


@pytest.mark.guarantee("State and samples", "Joined replicas never outvote the sender of their state.")
@pytest.mark.parametrize("reluctant", [False, True])
def test_joined_replicas_never_outvote_the_sender_of_their_state(reluctant: bool) -> None:
    """It changes by itself after it has given. Two who hold the same might be right, or spoiled alike on their way."""
    kills, joins = {0: 20, 3: 31}, {4: 21, 5: 70}
    played = play(
        Schedule(
            399253,
            Grid(4),
            "balanced",
            kills,
            drifts={1: 3},
            leaves={1: 3},
            joins=joins,
            suspicions={2: 65},
            kept=True,
            reluctant=reluctant,
        )
    )
    assert set(played.simulation.finished) == {1}
    assert {played.simulation.dead[4], played.simulation.dead[5]} <= set(REMOVED)


def test_joining_ranks_are_removed_first_when_half_of_all_ranks_fail() -> None:
    """Nobody could tell whose fault it is; without the member nobody would hold the state."""
    played = play(Schedule(1, Grid(2), "balanced", {0: 26}, sick={1: (3, 5, True)}, joins={2: 27}, kept=True))
    assert (played.simulation.finished, played.simulation.dead[2]) == ({1: "done"}, "excluded")


@pytest.mark.guarantee(
    "Joining",
    "Any schedule of joins and deaths keeps exactly B, exact samples, one membership and an unbroken "
    "sequence of steps.",
)
@pytest.mark.soak
def test_hundred_thousand_schedules_with_joins_keep_every_invariant() -> None:
    explore(range(100_000), joining_schedule)


@pytest.mark.soak
def test_fifty_thousand_persisted_schedules_never_let_the_dead_commit() -> None:
    explore(range(50_000), kept_schedule)


def agreements(played: Played) -> int:
    assert played.simulation.kept is not None
    return len(played.simulation.kept.decisions)


@pytest.mark.guarantee("Joining", "Members do not wait for a joining replica that is not ready.")
def test_members_do_not_wait_for_a_joining_replica_that_is_not_ready() -> None:
    """One that warms up for long, dies over it, or asks when all is over costs the others no agreement at all."""
    for seed in range(10):
        alone = agreements(play(Schedule(seed, Grid(3), kept=True, joins={3: 9}, kills={3: 0})))
        late = Schedule(seed, Grid(3), kept=True, joins={3: 3000})
        killed = Schedule(seed, Grid(3), kept=True, joins={3: 50}, kills={3: 1 + 4 * seed})
        for schedule in (late, killed):
            played = play(schedule)
            assert agreements(played) == alone, seed
            assert played.censuses() == {1: ((0, 1, 2), (), ())}, seed


@pytest.mark.guarantee(
    "Joining", "A repair for a join begins only after all members have seen the same request."
)
def test_simultaneous_join_requests_are_admitted_in_one_repair() -> None:
    """And no repair is for nothing: it is not entered before all see the same one."""
    shapes: Counter[tuple[int, ...]] = Counter()
    for seed in range(30):
        played = play(Schedule(seed, Grid(2, 2), kept=True, joins={2: 0, 3: 0, 4: 60}))
        later = [view for epoch, view in sorted(played.censuses().items()) if epoch > 1]
        shapes[tuple(len(joined) // 2 for _, _, joined in later)] += 1
        assert set(played.simulation.finished.values()) == {"done"}, seed
    assert not any(0 in shape for shape in shapes), shapes
    assert sum(count for shape, count in shapes.items() if max(shape, default=0) > 1) > 3, shapes
    assert sum(count for shape, count in shapes.items() if len(shape) > 1) > 3, shapes


@pytest.mark.guarantee(
    "Joining", "The world continues with joined replicas after all original replicas have died."
)
def test_world_continues_with_joined_replicas_after_all_originals_die() -> None:
    """All who were there at the start die after they have passed the state on; nothing is lost with them."""
    ends: Counter[str] = Counter()
    for seed in range(40):
        joins, kills = {2: 0, 3: 0}, {0: 110 + seed, 1: 110 + seed}
        played = play(Schedule(seed, Grid(2), kept=True, joins=joins, kills=kills))
        ends.update(str(end) for rank, end in played.simulation.finished.items() if rank > 1)
        if "done" in ends and all(rank in played.simulation.dead for rank in (0, 1)):
            ends["taken over"] += 1
    assert ends["taken over"] > 5, ends


@pytest.mark.guarantee(
    "Joining", "The world continues with joined replicas after all original replicas have died."
)
def test_replica_with_the_lowest_number_may_join_last() -> None:
    """Numbers are given when a replica is started, not when it is ready."""
    seen = 0
    for seed in range(40):
        kills = {0: 90 + seed, 1: 90 + seed}
        played = play(Schedule(seed, Grid(2), kept=True, joins={3: 0, 2: 120}, kills=kills))
        epochs = played.censuses()
        assert sorted(epochs) == list(range(1, len(epochs) + 1)), seed
        seen += any(joined == members[:1] for epoch, (members, _, joined) in epochs.items() if epoch > 1)
    assert seen > 3


@pytest.fixture(scope="module")
def calm() -> dict[int, tuple[object, ...]]:
    """Of one replica that nothing happens to."""
    run = Training(1)
    run.run()
    return run.commits[0]


@pytest.mark.guarantee(
    "Joining",
    "A joining `recover.Step` has the bits of a failure-free run through any schedule of deaths and joins.",
)
def test_joining_step_has_failure_free_bits_whichever_rank_dies(
    calm: dict[int, tuple[object, ...]],
) -> None:
    """Samples, loss, learning rate, what the user has added, parameters, buffers and optimizer, after every step of
    every rank, the dead included."""
    seen: Counter[str] = Counter()
    for seed in range(TRAINED):
        rng = random.Random(f"training/{seed}")
        victims = rng.sample(range(3), rng.randint(0, 2))
        kills = {victim: rng.randint(20, 110) for victim in victims}
        joins = {3: rng.randint(0, 20), 4: rng.randint(0, 40)}
        if rng.random() < 0.3:
            kills[3] = rng.randint(0, 60)
        run = Training(3, seed, kills, joins)
        simulation = run.run()
        assert set(simulation.finished.values()) <= {"done"}, (seed, simulation.finished)
        for rank, commits in run.commits.items():
            for number, commit in commits.items():
                assert commit == calm[number], f"seed {seed}: rank {rank} after step {number}"
            assert sorted(commits) == list(range(min(commits, default=1), max(commits, default=0) + 1))
        seen.update("joined" for rank, commits in run.commits.items() if rank > 2 and commits)
        seen.update("died" for rank in simulation.dead if simulation.dead[rank] == "killed")
    assert seen["joined"] > TRAINED // 2, seen
    assert seen["died"] > TRAINED // 3, seen


@pytest.mark.guarantee("Joining", "A joining replica with damaged optimizer state commits nothing.")
def test_joining_replica_with_damaged_optimizer_state_commits_nothing(
    calm: dict[int, tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parameters are right until its first update; the first vote after a join compares the moments, too."""
    install = Parcel.install

    def install_and_damage(parcel: Parcel) -> dict[str, Any]:
        position = install(parcel)
        for state in parcel._optimizer.state.values():
            state["exp_avg"].add_(1.0)
        return position

    monkeypatch.setattr(Parcel, "install", install_and_damage)
    run = Training(2, seed=0, joins={2: 0})
    simulation = run.run()
    assert run.joined, "nobody has joined"
    assert simulation.finished == {0: "done", 1: "done"}
    assert simulation.dead == {2: "excluded"}
    assert not run.commits[2]
    assert all(run.commits[0][number] == calm[number] for number in run.commits[0])


@pytest.mark.guarantee("Joining", "Partitioned samples are used once when replicas join.")
@pytest.mark.parametrize("policy", ["balanced", "static", "adaptive"])
def test_partitions_continue_on_joined_replicas_without_reuse_of_samples(policy: str) -> None:
    for seed in range(4):
        run = Training(3, seed, {1: 40}, {3: 0, 4: 5}, {"samples": "partitioned", "policy": policy}, steps=8)
        simulation = run.run()
        assert set(simulation.finished.values()) == {"done"}, seed
        (first, *others) = [run.commits[rank] for rank in sorted(simulation.finished)]
        used = [sample for number in sorted(first) for sample in first[number][0]]  # type: ignore[attr-defined]
        assert len(set(used)) == len(used), seed
        if policy != "adaptive":
            assert len(used) == 8 * 4, seed
        for commits in others:
            assert all(commits[number] == first[number] for number in commits), seed


def test_schedules_include_worlds_larger_than_the_batch() -> None:
    """So there are replicas without a share, and spares without a counterpart, among the schedules."""
    assert any(len(joining_schedule(seed).ranks) > BATCH for seed in range(JOINING))
