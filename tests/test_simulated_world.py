"""The protocol under thousands of schedules that no real machine would show us in a year."""

from __future__ import annotations

from collections import Counter

import pytest
from simulated_run import Diary, Rank, play

from recover.fabrics.simulated import HangError, SimulatedFabric, Simulation
from recover.job.grid import Grid
from recover.world.membership import ExcludedError, Membership, Phase


def explore(seeds: range, rank_class: type[Rank] = Rank) -> Counter[str]:
    deaths: Counter[str] = Counter()
    for seed in seeds:
        try:
            play(seed, rank_class, on_end=lambda simulation: deaths.update(simulation.dead.values()))
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
    assert min(deaths[how] for how in ("orphan", "excluded", "fenced")) > 50, deaths


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
