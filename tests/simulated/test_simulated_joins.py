"""Joining replicas, under schedules in which any rank may die at any moment; and agreements whose decisions are kept,
as etcd keeps them, with ranks that are cut off or declared dead while they live."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recover_lab.simulated_world.parts import InlineWorker
from simulated_laws import REMOVED, Played, play
from simulated_schedules import (
    BATCH,
    Schedule,
    aimed_instalments_schedule,
    aimed_join_schedule,
    instalments_schedule,
    joining_schedule,
    kept_schedule,
)
from simulated_training import Training
from test_simulated_world import explore

from recover.faults.locations import IN_INSTALMENTS, JOIN_PHASES, REPAIR_PHASES
from recover.job.grid import Grid
from recover.step.joining import joinable
from recover.step.joining.instalments import FIRST_RATE, SECONDS, InstalmentSize
from recover.step.joining.parcel import Parcel
from recover.world.hooks import NoHooks
from recover.world.liveness.board import ScriptStage
from recover.world.membership import WORD_BITS

KEPT, JOINING, AIMED, TRAINED = 100, 120, 80, 10
INSTALMENTS, AIMED_INSTALMENTS, TRAINED_ON = 40, 40, 4


@pytest.mark.guarantee(
    "Joining",
    "A rank that was declared dead never commits where decisions are persisted, whether it is isolated or "
    "slow.",
)
def test_declared_dead_rank_never_commits_under_persisted_decisions() -> None:
    """Partitions, slowness, stops and deaths: the commits of all ranks, the dead included, are equal."""
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


@pytest.mark.guarantee(
    "Joining",
    "Any schedule of deaths, and of joins in instalments, keeps exactly B, exact samples, one membership and an "
    "unbroken sequence of steps.",
)
def test_schedules_of_instalments_and_deaths_keep_every_invariant() -> None:
    """Some schedules have verified slots, and agreements and sums between steps, in which joining ranks take part."""
    seen = explore(range(INSTALMENTS), instalments_schedule)
    assert seen["joined"] > INSTALMENTS // 4, seen


@pytest.mark.guarantee(
    "Joining", "A death between two instalments of the state costs a repair, and any other member continues."
)
def test_death_at_every_location_of_instalments_is_an_ordinary_death() -> None:
    seen = explore(range(AIMED_INSTALMENTS), aimed_instalments_schedule)
    assert min(seen[f"at {place}"] for place in IN_INSTALMENTS) > 1, seen


@pytest.mark.guarantee(
    "Faults, hangs and stragglers",
    "A rank that joins in instalments never ends the last replica that holds the state, if that is stopped.",
)
def test_joining_rank_does_not_end_a_stopped_last_member() -> None:
    """The stopped member may go on later. Once another replica holds the state, the stopped one is ended as usual."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        stopped_at = 15 + 5 * seed
        played = play(
            Schedule(seed, Grid(1), joins={1: 0}, stops={0: stopped_at}, kept=True, instalments=True)
        )
        simulation = played.simulation
        if 0 not in simulation.stopped:
            continue
        fenced = simulation.dead.get(0) == "fenced"
        assert fenced == (simulation.board.stage(1) is ScriptStage.STATE), (seed, simulation.dead)
        waited = 1 in simulation.board.here() and bool(simulation.board.step(1)) and not fenced
        seen.update(["ended" if fenced else "waited" if waited else "too early"])
    assert min(seen["ended"], seen["waited"]) > 3, seen


@pytest.mark.soak
def test_twenty_thousand_schedules_of_instalments_keep_every_invariant() -> None:
    explore(range(20_000), instalments_schedule)


@pytest.mark.guarantee("State and samples", "Joined replicas never outvote the sender of their state.")
@pytest.mark.parametrize("reluctant", [False, True])
def test_joined_replicas_never_outvote_the_sender_of_their_state(reluctant: bool) -> None:
    """The sender's state changes after it was sent. Two joined replicas with equal state might be right, or damaged
    alike in the transfer."""
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
    """The fault could lie on either side; without the member no replica would hold the state."""
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
    """A replica that warms up for long, dies meanwhile, or asks after the end costs the others no agreement."""
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
    """No repair is in vain: members do not enter it before all of them see the same request."""
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
    """All original replicas die after they have handed the state over; nothing is lost with them."""
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
    """The commits of one replica in a run without faults."""
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
    """Compares samples, loss, learning rate, the user's extra, parameters, buffers and optimizer, after every step of
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


SMALL = 8_000  # bytes of an instalment: a ninth of the state
LONG = 12  # steps


@pytest.fixture
def in_small_instalments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(InstalmentSize, "limit", lambda *_: SMALL)
    return {"join": "instalments"}


@pytest.fixture(scope="module")
def long_calm() -> dict[int, tuple[object, ...]]:
    run = Training(1, steps=LONG)
    run.run()
    return run.commits[0]


@pytest.mark.guarantee(
    "Joining", "State that is handed over in instalments, while the others train on, has the same bits."
)
def test_step_that_joined_in_instalments_has_failure_free_bits(
    long_calm: dict[int, tuple[object, ...]], in_small_instalments: dict[str, Any]
) -> None:
    """Ranks die at random during the join, and the script calls `step.confirm` between steps."""
    joined: list[Any] = []
    for seed in range(TRAINED_ON):
        rng = random.Random(f"training on/{seed}")
        kills = {victim: rng.randint(40, 200) for victim in rng.sample(range(3), rng.randint(0, 2))}

        def confirm(_: int, step: Any) -> None:
            if step.index % 3 == 0:
                step.confirm()

        run = Training(3, seed, kills, {3: rng.randint(0, 20)}, in_small_instalments, LONG, between=confirm)
        simulation = run.run()
        assert "excluded" not in simulation.dead.values(), run.last_words  # its first vote compares all state
        assert set(simulation.finished.values()) <= {"done"}, (seed, simulation.finished)
        for rank, commits in run.commits.items():
            for number, commit in commits.items():
                assert commit == long_calm[number], f"seed {seed}: rank {rank} after step {number}"
        joined += [incident for incident in run.incidents if incident.joined_ranks]
    assert joined
    assert all(incident.joining_steps > 2 for incident in joined), joined


class ByTheirNumber(torch.optim.SGD):
    """An optimizer that sees all parameters at once: its update of one depends on how many there are."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        count = sum(p.grad is not None for group in self.param_groups for p in group["params"])
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-0.01 / count)


@pytest.mark.guarantee(
    "Joining",
    "Where an optimizer sees all parameters at once, a replica that joined in instalments is evicted in its first "
    "vote, and the next one joins in one pause.",
)
def test_next_replica_joins_in_one_pause_after_instalments_failed(
    in_small_instalments: dict[str, Any],
) -> None:
    run = Training(
        2,
        joins={2: 0, 3: 150},
        options=in_small_instalments,
        steps=30,
        make_optimizer=lambda parameters: ByTheirNumber(parameters, lr=0.01),
    )
    simulation = run.run()
    assert simulation.dead == {2: "excluded"}, simulation.dead
    assert "its parameters differ from the majority" in run.last_words[2]
    assert not run.commits[2]
    came = [incident for incident in run.incidents if incident.joined_ranks]
    assert [incident.joined_ranks for incident in came] == [(2,), (3,)]
    assert [incident.joining_steps > 0 for incident in came] == [True, False]
    calm = Training(1, steps=30, make_optimizer=lambda parameters: ByTheirNumber(parameters, lr=0.01))
    calm.run()
    assert all(run.commits[3][number] == calm.commits[0][number] for number in run.commits[3])


def test_parameter_that_changes_outside_of_the_update_is_handed_over_last(
    in_small_instalments: dict[str, Any],
) -> None:
    """The user's code changes the parameter after each step: a copy that the joining replica received before is
    stale."""

    def clamp(_: int, step: Any) -> None:
        with torch.no_grad():
            next(step._model.parameters()).clamp_(-0.1, 0.1)

    run = Training(2, joins={2: 0}, options=in_small_instalments, steps=LONG, between=clamp)
    simulation = run.run()
    assert simulation.finished.keys() == {0, 1, 2}, run.last_words
    (came,) = [incident for incident in run.incidents if incident.joined_ranks]
    assert came.joining_steps > 2
    assert all(run.commits[2][number] == run.commits[0][number] for number in run.commits[2])


def test_buffer_that_hooks_of_the_optimizer_change_is_handed_over_last(
    in_small_instalments: dict[str, Any],
) -> None:
    """Such a buffer is the bias of experts that follows from the tokens of each: a joining replica does not have these
    counts, and no vote compares the bias."""

    def add_bias(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.register_buffer("bias", torch.zeros(16))

        def follow(*_: Any) -> None:
            model.bias.add_(model.average)  # type: ignore[operator]

        optimizer.register_step_pre_hook(follow)

    run = Training(2, joins={2: 0}, options=in_small_instalments, steps=LONG, prepare=add_bias)
    simulation = run.run()
    assert simulation.finished.keys() == {0, 1, 2}, run.last_words
    (came,) = [incident for incident in run.incidents if incident.joined_ranks]
    assert came.joining_steps > 2
    assert all(run.commits[2][number] == run.commits[0][number] for number in run.commits[2])


def test_agreements_of_the_script_keep_all_bits_while_a_replica_joins(
    in_small_instalments: dict[str, Any],
) -> None:
    every, agreed = (1 << WORD_BITS) - 1, set[Any]()
    run = Training(
        2,
        joins={2: 0},
        options=in_small_instalments,
        steps=LONG,
        between=lambda _, step: agreed.add(step.world.agree(every)),
    )
    run.run()
    assert [incident.joining_steps > 2 for incident in run.incidents if incident.joined_ranks] == [True]
    assert agreed == {every}


def add_layer(step: Any) -> None:
    step._model.more = torch.nn.LayerNorm(3)
    step._optimizer.add_param_group({"params": list(step._model.more.parameters())})


def add_setting(step: Any) -> None:
    step._optimizer.param_groups[0]["note"] = object()


@pytest.mark.parametrize(
    ("change", "why"),
    [(add_layer, "parameters and buffers (name, type, shape here) are"), (add_setting, "note is a object")],
)
def test_change_that_ends_a_join_in_instalments_costs_no_member(
    in_small_instalments: dict[str, Any], change: Callable[[Any], None], why: str
) -> None:
    """The user's code adds a layer that the joining replica, which runs none of that code, does not have, or a setting
    that cannot be sent."""

    changed = dict[int, int]()

    def act(rank: int, step: Any) -> None:
        if step._engine.result.joining and rank not in changed and step.index > 5:
            changed[rank] = step.index
            change(step)

    run = Training(2, joins={2: 0}, options=in_small_instalments, steps=LONG, between=act)
    simulation = run.run()
    assert simulation.finished == {0: "done", 1: "done"}
    assert why in run.last_words[2]
    assert max(run.commits[0]) == LONG
    assert changed[0] == changed[1] < LONG - 1


def test_joining_rank_that_hangs_in_an_update_is_late(in_small_instalments: dict[str, Any]) -> None:
    """The joining rank is inside of a step during each update: only ranks inside of a step that others have come to
    vote on are taken for stuck."""
    steps = list[tuple[int, int]]()

    class Look(NoHooks):
        def __call__(self, location: str, detail: object = None) -> None:
            if location == "update":
                steps.append((self.step, run.simulation.board.step(2)))

    run = Training(
        2,
        joins={2: 0},
        options=in_small_instalments,
        steps=LONG,
        hooks=lambda rank: Look() if rank == 2 else NoHooks(),
    )
    assert run.run().finished.keys() == {0, 1, 2}
    came = next(incident for incident in run.incidents if incident.joined_ranks)
    updates = [there for last, there in steps if last < came.step]
    assert len(updates) > 2
    assert 0 not in updates


def test_tensors_that_were_handed_over_are_freed_after_the_join(in_small_instalments: dict[str, Any]) -> None:
    freed = list[Any]()

    def replace_moment(rank: int, step: Any) -> None:
        if rank == 0 and step.index == LONG - 1:
            state = next(iter(step._optimizer.state.values()))
            freed.append(weakref.ref(state["exp_avg"]))
            state["exp_avg"] = state["exp_avg"].clone()

    run = Training(2, joins={2: 0}, options=in_small_instalments, steps=LONG, between=replace_moment)
    simulation = run.run()
    assert simulation.finished.keys() == {0, 1, 2}
    assert [reference() for reference in freed] == [None]


def test_join_in_instalments_searches_for_schedulers_once(
    in_small_instalments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search visits all objects of the process, and the other replicas wait for it."""
    searches = Counter[int]()

    def search(optimizer: Any, declared: Any) -> list[Any]:
        searches[id(optimizer)] += 1
        return []

    monkeypatch.setattr(joinable, "undeclared_schedulers", search)
    run = Training(2, joins={2: 0}, options=in_small_instalments, steps=LONG)
    assert run.run().finished.keys() == {0, 1, 2}
    assert [incident.joining_steps > 2 for incident in run.incidents if incident.joined_ranks]
    assert set(searches.values()) == {1}, searches


def test_transfer_that_failed_tells_nothing_of_the_rate() -> None:
    """A failed transfer takes no time: by its rate, the next instalment would be all of the state."""
    size = InstalmentSize(InlineWorker())
    size.timed(10**12, lambda: None, lambda: False)
    assert size.limit(0) == int(FIRST_RATE * SECONDS)


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
    """Such worlds have replicas without a share, and spares without a counterpart."""
    assert any(len(joining_schedule(seed).ranks) > BATCH for seed in range(JOINING))
