"""The protocol under thousands of schedules that no real machine would show us in a year."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from simulated_run import Diary, Rank, Schedule, large_schedule, play, random_schedule

from recover.fabrics.simulated import (
    HangError,
    SimulatedCarrier,
    SimulatedCarriers,
    SimulatedFabric,
    Simulation,
)
from recover.job.grid import Grid
from recover.world.membership import (
    FAILURES,
    FRUITLESS,
    WORD_BITS,
    ExcludedError,
    Membership,
    NoCarrierError,
    Phase,
)


def explore(seeds: range, draw: Callable[[int], Schedule] = random_schedule) -> Counter[str]:
    """How ranks died, and how many had carriers that fail for ever and were left out for it."""
    deaths: Counter[str] = Counter()

    def count(simulation: Simulation) -> None:
        deaths.update(simulation.dead.values())
        deaths[f"of {simulation.grid.ranks // WORD_BITS} words"] += (
            max(simulation.dead, default=0) >= WORD_BITS
        )
        deaths.update(["sick" for rank in simulation.sick if simulation.dead.get(rank) == "excluded"])
        deaths["gave up"] += "no carrier" in simulation.finished.values()

    for seed in seeds:
        try:
            play(seed, on_end=count, draw=draw)
        except (AssertionError, HangError) as violation:
            pytest.fail(f"schedule {seed}: {type(violation).__name__}: {violation}")
    return deaths


def first_violation(rank_class: type[Rank], schedules: int = 3000) -> str | None:
    for seed in range(schedules):
        try:
            play(seed, rank_class)
        except (AssertionError, HangError) as violation:
            return f"{type(violation).__name__}: {violation}"
    return None


def test_no_schedule_of_deaths_tears_hangs_or_corrupts_the_world() -> None:
    deaths = explore(range(2500))
    # The schedules must really contain what they claim to explore.
    assert deaths["killed"] > 2500
    assert min(deaths[how] for how in ("orphan", "excluded", "fenced", "sick")) > 50, deaths
    assert min(deaths[how] for how in ("seen off", "gave up")) > 10, deaths


def test_deaths_among_more_ranks_than_a_word_has_bits_are_seen_like_all_others() -> None:
    deaths = explore(range(5), large_schedule)
    assert deaths["of 1 words"] > 0, deaths
    assert deaths["of 2 words"] > 0, deaths


def repaired(simulation: Simulation) -> dict[int, str]:
    """One repair; what each rank made of it."""

    def run(fabric: SimulatedFabric) -> str:
        carriers = SimulatedCarriers(simulation, fabric)
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


def test_who_cannot_make_a_carrier_is_left_out_with_its_replica_and_says_why() -> None:
    told = repaired(Simulation(Grid(3, 2), 1, sick={3: (1, 10**6, False)}))
    assert [told[rank] for rank in (0, 1, 4, 5)] == ["members [0, 1, 4, 5]"] * 4
    assert "was excluded by the others, for it failed in 3 rounds of a repair" in told[3]
    assert "no carrier could be made: OSError: no socket is left" in told[3]
    assert "lost a mate of its replica" in told[2]
    told = repaired(Simulation(Grid(2), 1, sick={0: (1, 10**6, False)}))  # it says so itself: half may say so
    assert told[1] == "members [1]"


@pytest.mark.parametrize("seed", range(5))
def test_who_fails_for_less_than_the_limit_is_kept(seed: int) -> None:
    for can_be_made in (False, True):
        told = repaired(Simulation(Grid(3), seed, sick={1: (1, FAILURES - 1, can_be_made)}))
        assert told == dict.fromkeys(range(3), "members [0, 1, 2]")


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
def test_without_a_majority_that_can_build_all_give_up_and_name_the_cause_of_each(
    sick: dict[int, tuple[int, int, bool]], cause: str
) -> None:
    told = repaired(Simulation(Grid(4), 1, sick=sick))
    assert len(told) == 4
    for text in told.values():
        assert "the world cannot be repaired: nobody died" in text
        assert all(f"rank {rank}: {cause}" in text for rank in sick), text


def test_rounds_that_come_to_nothing_are_bounded_whatever_they_fail_by() -> None:
    """Each round another one fails, so nobody ever fails often enough to be left out."""
    simulation = Simulation(Grid(5), 1)

    class Fickle(SimulatedCarriers):
        def make(self, members: tuple[int, ...]) -> SimulatedCarrier:
            self._simulation.sick = {self._made % 5: (1, 10**6, False)}
            return super().make(members)

    rounds: Counter[int] = Counter()

    def run(fabric: SimulatedFabric) -> str:
        world = Membership(fabric, simulation.grid, Fickle(simulation, fabric), lambda location, detail: None)
        world._report = lambda text: rounds.update([fabric.rank] * ("once more" in text))
        with pytest.raises(NoCarrierError, match=f"{FRUITLESS} rounds came to nothing"):
            world.repair(b"")
        return "ended"

    assert simulation.run(run) == dict.fromkeys(range(5), "ended")
    assert rounds == dict.fromkeys(range(5), FRUITLESS)


@pytest.mark.soak
def test_no_schedule_out_of_a_hundred_thousand_tears_hangs_or_corrupts_the_world() -> None:
    explore(range(100_000))


def test_who_is_to_be_evicted_is_left_out_with_its_replica_and_nobody_else_is() -> None:
    for seed in range(50):
        grid = Grid(3, 2)
        simulation = Simulation(grid, seed, {}, 0)
        members: dict[int, tuple[int, ...]] = {}

        def run(fabric: SimulatedFabric) -> str:
            rank = Rank(simulation, fabric, Diary())  # noqa: B023
            rank.world.repair(b"")
            try:
                members[fabric.rank] = rank.world.repair(b"", evict=frozenset({3})).members  # noqa: B023
            except ExcludedError:
                simulation.kill(fabric.rank, "excluded")  # noqa: B023
                return "excluded"
            fabric.linger(5.0)
            return "done"

        simulation.run(run)
        # Whoever an agreement forgets gives itself up, and takes its replica along; but nobody else is left out.
        assert {rank for rank, why in simulation.dead.items() if why == "excluded"} >= {2, 3}, seed
        assert members, seed
        assert all({2, 3}.isdisjoint(those) for those in members.values()), seed
        assert simulation.dead.keys() == {2, 3} or "fenced" in simulation.dead.values(), seed


class TrustsItsOwnList(Membership):
    """Broken: takes the members from the rank's own list of deaths instead of from the agreed bitmap."""

    def _agree_on_members(self, evict: frozenset[int]) -> tuple[int, ...] | None:
        dead = self.fabric.acknowledge()
        if self._agree(Phase.MEMBERS, 1) is None:
            return None
        self._round += 1
        members = self.grid.whole(set(range(self.grid.ranks)) - dead - evict)
        if self.fabric.rank not in members:
            raise ExcludedError(self.fabric.rank, members, orphan=True)
        return members


class SkipsTheClosingAgreement(Membership):
    """Broken: a member that built its carrier goes on, whatever became of the others."""

    def _close(self, built: bool) -> bool:
        return built


class MixesPhases(Membership):
    """Broken: counts in what a dead rank said about something else."""

    def _agree(self, phase: Phase, word: int) -> int | None:
        return self.fabric.agree(int(word))


class CommitsOnLocalSuccess(Rank):
    """Broken: a rank whose own reduction succeeded commits, and votes only to be polite."""

    def verdict(self, total: frozenset | None) -> bool:
        return super().verdict(total) or total is not None


def with_membership(broken: type[Membership]) -> type[Rank]:
    return type(broken.__name__, (Rank,), {"membership_class": broken})


@pytest.mark.parametrize(
    "broken",
    [
        with_membership(TrustsItsOwnList),
        with_membership(SkipsTheClosingAgreement),
        with_membership(MixesPhases),
        CommitsOnLocalSuccess,
    ],
    ids=lambda broken: broken.__name__,
)
def test_a_broken_protocol_is_caught(broken: type[Rank]) -> None:
    assert first_violation(broken) is not None
