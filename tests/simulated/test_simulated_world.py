"""The protocol under thousands of schedules that no real machine would show in a year, with the code that users
run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pytest
from recover_lab.simulated_world.carriers import SimulatedCarrier, SimulatedCarriers
from recover_lab.simulated_world.parts import InlineWorker, simulated_parts
from recover_lab.simulated_world.scheduler import HangError, SimulatedFabric, Simulation
from simulated_laws import play, shrink, violation
from simulated_schedules import (
    BATCH,
    PLACES,
    RECOVERIES,
    STEPS,
    Schedule,
    aimed_schedule,
    large_schedule,
    paced_schedule,
    random_schedule,
)

from recover.job.grid import Grid
from recover.job.spec import JobSpec
from recover.policy import Layout, get_policy, paced
from recover.world.liveness.board import ACCOMPLISHED
from recover.world.membership import (
    FAILURES,
    FRUITLESS,
    WORD_BITS,
    ExcludedError,
    Membership,
    NoCarrierError,
)
from recover.world.world import World

SCHEDULES = 600
AIMED = 260
PACED = 200


def explore(seeds: Iterable[int], draw: Callable[[int], Schedule] = random_schedule) -> Counter[str]:
    """Play the schedules, and count how ranks died and how runs ended. A violation is reported with the smallest
    schedule that still shows it."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        schedule = draw(seed)
        try:
            played = play(schedule)
        except (AssertionError, HangError) as wrong:
            small = shrink(schedule)
            pytest.fail(f"seed {seed}: {wrong!r}\nreplay it with play({small}): {violation(small)}")
        seen.update(played.kinds())
        if any(rank >= WORD_BITS for rank in played.simulation.dead):
            seen.update([f"of {schedule.grid.ranks // WORD_BITS} words"])
    return seen


@pytest.mark.guarantee("Membership", "No schedule of deaths splits, hangs or corrupts the world.")
@pytest.mark.guarantee("Membership", "An evicted rank is dead before the others continue.")
@pytest.mark.guarantee("The trainer", "No record line is lost, doubled or torn when the writer dies.")
@pytest.mark.slow
def test_schedules_of_deaths_keep_every_invariant() -> None:
    seen = explore(range(SCHEDULES))
    # The schedules must really contain what they claim to explore.
    assert seen["killed"] > SCHEDULES
    assert (
        min(seen[how] for how in ("orphan", "excluded", "fenced", "raised", "stopped")) > SCHEDULES // 25
    ), seen
    assert min(seen[how] for how in ("seen off", "left out", "no carrier")) > 5, seen
    assert min(seen[end] for end in ("diverged", "poisoned", "reran")) > 5, seen


@pytest.mark.guarantee(
    "The batch",
    "Every step commits exactly B microbatches when two replicas die at once or during a recovery.",
)
@pytest.mark.guarantee(
    "Membership", "All survivors hold the same members, epoch, census and verdict with both carriers."
)
@pytest.mark.guarantee("Membership", "A death inside the repair of another death is repaired.")
@pytest.mark.guarantee("The trainer", "No record line is lost, doubled or torn when the writer dies.")
def test_deaths_at_every_location_and_in_recoveries_keep_every_invariant() -> None:
    seen = explore(range(AIMED), aimed_schedule)
    assert min(seen[f"at {place}"] for place in (*PLACES, *RECOVERIES)) > 5, seen
    assert min(seen[how] for how in ("two at once", "one in the recovery from another")) > 5, seen


@pytest.mark.guarantee(
    "Paced shares", "All ranks deal the same shares by speed, through deaths, joins and repeated steps."
)
def test_paced_shares_keep_every_invariant_through_deaths_and_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shares change after every step: the speeds of all replicas are drawn again, and each rank of a replica measures
    a different time."""
    monkeypatch.setattr(paced, "WINDOW", 2)
    monkeypatch.setattr(paced, "KNOWN", 1)
    monkeypatch.setattr(paced, "GAIN", 1.0)
    layouts: set[tuple[int, ...]] = set()
    dealt = paced.PacedWorldPolicy.layout

    def layout(policy: paced.PacedWorldPolicy, replicas: Sequence[int], batch: int) -> Layout:
        plan = dealt(policy, replicas, batch)
        layouts.add(tuple(len(share.run) for share in plan.shares))
        return plan

    monkeypatch.setattr(paced.PacedWorldPolicy, "layout", layout)
    seen = explore(range(PACED), paced_schedule)
    assert seen["killed"] > PACED // 2, seen
    assert len(layouts) > 20, layouts


@pytest.mark.guarantee("The trainer", "No record line is lost, doubled or torn when the writer dies.")
@pytest.mark.parametrize("victims", [(0,), (2,), (0, 1), (0, 2)])
def test_deaths_while_the_run_is_closed_are_in_its_journal(victims: tuple[int, ...]) -> None:
    """After the last step all ranks write missing lines, and the survivors write again after a death: the law of the
    journal checks that its line is there."""
    for seed in range(5):
        played = play(Schedule(seed, Grid(3), aims=dict.fromkeys(victims, (STEPS, "close"))))
        assert set(played.simulation.dead) == set(victims)


@pytest.mark.guarantee("Work kept after a death", "A dead spare costs a repair and no second reduction.")
@pytest.mark.parametrize(("policy", "owed"), [("static", 0), ("balanced", 1)])
def test_death_at_the_vote_costs_only_missing_sums(policy: str, owed: int) -> None:
    """The last of five replicas dies, which is a spare or runs one of six microbatches."""
    costs: Counter[tuple[bool, int]] = Counter()
    for seed in range(40):
        played = play(Schedule(seed, Grid(5), policy, aims={4: (2, "vote")}))
        costs.update(
            (incident.complete, incident.extra_microbatches)
            for rank in played.survivors
            for incident in played.diaries[rank].incidents[1][1]
        )
    assert costs.keys() == {(True, 0), (False, owed)}, costs


@pytest.mark.guarantee(
    "State and samples", "A sum with a drifted replica is not committed, even if that replica dies first."
)
def test_sum_with_a_drifted_replica_is_not_committed_when_it_dies() -> None:
    """The law of sums shows it; and no survivor takes its own sum for complete."""
    for seed in range(40):
        played = play(Schedule(seed, Grid(3), drifts={1: 2}, aims={1: (2, "vote")}))
        for rank in played.survivors:
            assert [i.complete for i in played.diaries[rank].incidents[1][1]] == [False], seed


@pytest.mark.guarantee(
    "The trajectory", "Survivors of the owner of the largest value never commit an inexact sum."
)
@pytest.mark.parametrize("replica_size", [1, 2])
def test_exponents_do_not_depend_on_the_death_of_the_largest_values_owner(replica_size: int) -> None:
    """The owner dies in the step that overflows, at every place, before or after the others know of the overflow. The
    laws compare the exponents of every commit with those of a run without failures."""
    grid, policy, seen = Grid(3, replica_size), get_policy("balanced", 3), Counter[str]()
    shares = policy.layout(range(grid.replicas), BATCH).shares
    for number, place in enumerate((*PLACES, "extra", *PLACES)):
        owner = shares[number % len(shares)]
        victim = owner.replica * replica_size + number % replica_size
        too_large = (2, next(iter(owner.run)))
        seen.update(
            play(Schedule(number, grid, "balanced", too_large=too_large, aims={victim: (2, place)})).kinds()
        )
    assert seen["reran"] == 2 * len(PLACES) + 1
    assert seen["killed"] >= 2 * len(PLACES)


@pytest.mark.guarantee(
    "Membership", "Deaths among more ranks than one agreement word holds are seen by all survivors."
)
def test_simulated_deaths_beyond_one_agreement_word_are_seen() -> None:
    seen = explore(range(5), large_schedule)
    assert seen["of 1 words"] > 0, seen
    assert seen["of 2 words"] > 0, seen


@pytest.mark.guarantee("Membership", "No schedule of deaths splits, hangs or corrupts the world.")
@pytest.mark.soak
def test_hundred_thousand_schedules_keep_every_invariant() -> None:
    explore(range(100_000))


@pytest.mark.guarantee("Membership", "A rank that stops while the world is created is fenced.")
@pytest.mark.parametrize("call", range(14))
def test_rank_that_stops_during_world_creation_is_fenced(
    call: int,
) -> None:
    for seed in range(3):
        played = play(Schedule(seed, Grid(2, 2), stops={3: call}))
        assert set(played.simulation.dead) == {2, 3}


def test_violation_is_shrunk_to_its_necessary_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a transaction that commits any sum, one fault is enough for a violation, and no other fault is left."""
    from recover.step.transaction import Transaction

    monkeypatch.setattr(Transaction, "recover", lambda self: True)
    schedule = next(s for seed in range(500) if violation(s := random_schedule(seed)) and len(s.kills) > 2)
    small = shrink(schedule)
    assert violation(small)
    faults = [small.kills, small.stops, small.sick, small.drifts, small.leaves]
    assert sum(map(len, faults)) + bool(small.stalls) + bool(small.poison) == 1, small


def repaired(simulation: Simulation) -> dict[int, str]:
    """Run one repair, and return its outcome on each rank."""

    def run(fabric: SimulatedFabric) -> str:
        carriers = SimulatedCarriers(simulation, fabric, InlineWorker())
        world = Membership(fabric, simulation.grid, carriers, lambda location, detail: None)
        try:
            members = world.repair(b"").members
            fabric.linger(5.0)
            return f"members {list(members)}"
        except ExcludedError as excluded:
            simulation.kill(fabric.rank, str(excluded))
            return ""
        except NoCarrierError as error:
            return str(error)

    return {**simulation.run(run), **simulation.dead}


@pytest.mark.guarantee("Membership", "Results that only dead ranks have seen bind no survivor.")
def test_deaths_in_one_repair_cost_no_other_rank() -> None:
    """A rank may hold a result that dies with it, and have sent its word for the next agreement already: the others
    decide again, and come to the next agreement with another question."""
    for seed in range(3000):
        rng = random.Random(f"one repair/{seed}")
        ranks = range(rng.randint(2, 4))
        victims = rng.sample(ranks, rng.randint(1, len(ranks) - 1))
        simulation = Simulation(Grid(len(ranks)), seed, {victim: rng.randint(4, 9) for victim in victims})
        repaired(simulation)
        assert set(simulation.dead.values()) <= {"killed"}, f"seed {seed}: {simulation.dead}"
        assert simulation.finished.keys() >= set(ranks) - set(victims), seed


@pytest.mark.guarantee(
    "Membership",
    "A rank that cannot build a carrier is evicted with its replica and reason; without a majority that "
    "can, all ranks end and name every cause.",
)
def test_rank_that_cannot_build_a_carrier_is_evicted_with_its_reason() -> None:
    told = repaired(Simulation(Grid(3, 2), 1, sick={3: (1, 10**6, False)}))
    assert [told[rank] for rank in (0, 1, 4, 5)] == ["members [0, 1, 4, 5]"] * 4
    assert "rank 3, of replica 1 with rank 2, was evicted: it failed in 3 rounds of a repair" in told[3]
    assert "no carrier could be made: OSError: no socket is left" in told[3]
    assert "lost another rank of its replica" in told[2]
    told = repaired(Simulation(Grid(2), 1, sick={0: (1, 10**6, False)}))  # its own failure: half may fail so
    assert told[1] == "members [1]"


@pytest.mark.parametrize("seed", range(5))
def test_rank_that_fails_less_than_the_limit_is_kept(seed: int) -> None:
    for can_be_made in (False, True):
        told = repaired(Simulation(Grid(3), seed, sick={1: (1, FAILURES - 1, can_be_made)}))
        assert told == dict.fromkeys(range(3), "members [0, 1, 2]")


@pytest.mark.guarantee(
    "Membership",
    "A rank that cannot build a carrier is evicted with its replica and reason; without a majority that "
    "can, all ranks end and name every cause.",
)
@pytest.mark.parametrize(
    ("sick", "cause"),
    [
        (
            dict.fromkeys(range(4), (1, 10**6, False)),
            "no carrier could be made: OSError: no socket is left",
        ),
        (
            dict.fromkeys((0, 1), (1, 10**6, True)),
            "the carrier failed here: CarrierError: the trial sum took",
        ),
    ],
)
def test_world_without_a_building_majority_ends_and_names_each_cause(
    sick: dict[int, tuple[int, int, bool]], cause: str
) -> None:
    for seed in range(20):
        told = repaired(Simulation(Grid(4), seed, sick=sick))
        assert len(told) == 4
        for text in told.values():
            assert "the world cannot be repaired: nobody died" in text, seed
            assert all(f"rank {rank}: {cause}" in text for rank in sick), text


@pytest.mark.guarantee(
    "Membership",
    "A rank that cannot build a carrier is evicted with its replica and reason; without a majority that "
    "can, all ranks end and name every cause.",
)
def test_failed_repair_rounds_are_bounded() -> None:
    """In each round another rank fails, so none fails often enough to be evicted."""
    simulation = Simulation(Grid(5), 1)

    class Fickle(SimulatedCarriers):
        def make(self, members: tuple[int, ...]) -> SimulatedCarrier:
            self._simulation.sick = {self._made % 5: (1, 10**6, False)}
            return super().make(members)

    rounds: Counter[int] = Counter()

    def run(fabric: SimulatedFabric) -> str:
        world = Membership(
            fabric, simulation.grid, Fickle(simulation, fabric, InlineWorker()), lambda location, detail: None
        )
        world._report = lambda text: rounds.update([fabric.rank] * ("once more" in text))
        with pytest.raises(NoCarrierError, match=f"{FRUITLESS} rounds came to nothing"):
            world.repair(b"")
        return "ended"

    assert simulation.run(run) == dict.fromkeys(range(5), "ended")
    assert rounds == dict.fromkeys(range(5), FRUITLESS)


@pytest.mark.guarantee(
    "The launcher",
    "A job without progress is ended and shows every stack, and endless repairs are no progress.",
)
def test_only_unanimous_agreements_outside_of_steps_are_progress() -> None:
    """Votes of a step are no progress: the step may be repaired and vote again, for ever. Nor are agreements on words
    that differ."""
    simulation, seen = Simulation(Grid(2), 1), dict[int, list[tuple[int | None, int]]]()

    def run(fabric: SimulatedFabric) -> str:
        world = World(JobSpec(2, 1, token="simulated"), simulation.grid, simulated_parts(simulation, fabric))

        def agreed(word: int) -> tuple[int | None, int]:
            before = world.board.row(fabric.rank)[ACCOMPLISHED]
            return world.agree(word), world.board.row(fabric.rank)[ACCOMPLISHED] - before

        seen[fabric.rank] = [agreed(word) for word in (3, 0, 2 + fabric.rank, 1 + fabric.rank)]
        with world.step(1):
            seen[fabric.rank].append(agreed(3))
        fabric.linger(5.0)
        return "done"

    simulation.run(run)
    assert seen == {
        0: [(3, 1), (0, 0), (2, 1), (0, 0), (3, 0)],
        1: [(3, 1), (0, 0), (2, 0), (0, 0), (3, 0)],
    }


@pytest.mark.guarantee("Membership", "An eviction removes the named replica and no other.")
def test_eviction_removes_the_named_replica_only() -> None:
    for seed in range(50):
        grid = Grid(3, 2)
        simulation = Simulation(grid, seed, {}, 0)
        members: dict[int, tuple[int, ...]] = {}

        def run(fabric: SimulatedFabric) -> str:
            carriers = SimulatedCarriers(simulation, fabric, InlineWorker())  # noqa: B023
            world = Membership(fabric, grid, carriers, lambda location, detail: None)  # noqa: B023
            world.repair(b"")
            try:
                members[fabric.rank] = world.repair(b"", evict=frozenset({3})).members  # noqa: B023
            except ExcludedError:
                simulation.kill(fabric.rank, "excluded")  # noqa: B023
                return "excluded"
            fabric.linger(5.0)
            return "done"

        simulation.run(run)
        # A rank that an agreement forgets ends itself, and its replica with it; but no other rank is evicted.
        assert {rank for rank, why in simulation.dead.items() if why == "excluded"} >= {2, 3}, seed
        assert members, seed
        assert all({2, 3}.isdisjoint(those) for those in members.values()), seed
        assert simulation.dead.keys() == {2, 3} or "fenced" in simulation.dead.values(), seed
