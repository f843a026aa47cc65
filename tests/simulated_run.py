"""A small step protocol on the simulated world, and the laws that every schedule must keep.

Each step has a fixed set of slots; replicas reduce what they did, vote, and after a death redo what was lost. The
laws are checked over all that the ranks wrote down, the dead ones included.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from recover.carriers.contract import CarrierError
from recover.fabrics.simulated import SimulatedCarriers, SimulatedFabric, Simulation
from recover.job.grid import Grid
from recover.world.membership import (
    FAILURES,
    WORD_BITS,
    Census,
    ExcludedError,
    Membership,
    NoCarrierError,
)

STEPS = 3
SLOTS = 6


@dataclass
class Diary:
    """What a rank wrote down: its censuses, by epoch, and its commits, by step."""

    censuses: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    commits: dict[int, tuple[int, frozenset[Any]]] = field(default_factory=dict)


class Rank:
    """One virtual rank's training run."""

    membership_class: type[Membership] = Membership

    def __init__(self, simulation: Simulation, fabric: SimulatedFabric, diary: Diary) -> None:
        self.simulation, self.fabric, self.diary = simulation, fabric, diary
        self.grid = simulation.grid
        carriers = SimulatedCarriers(simulation, fabric)
        self.world = self.membership_class(fabric, self.grid, carriers, lambda location, detail: None)
        self.replica, self.shard = self.grid.replica(fabric.rank), self.grid.shard(fabric.rank)

    def run(self) -> str:
        try:
            self.note(self.world.repair(b"{}"))
            for step in range(STEPS):
                self.step(step)
            while self.world.agree(1) is None:  # the closing agreement: nobody leaves before all are through
                self.note(self.world.repair(json.dumps({"step": STEPS}).encode()))
            self.fabric.linger(5.0)
        except ExcludedError:
            self.simulation.leaving.add(self.fabric.rank)
            while self.simulation.reluctant and self.simulation.staying:
                self.fabric.pause(1.0)  # stuck on its way out: the others must not go on before it is dead
            self.simulation.kill(self.fabric.rank, "excluded")
            return "excluded"
        except NoCarrierError:
            return "no carrier"
        return "done"

    def step(self, step: int) -> None:
        living = self.grid.replicas_of(self.world.members)
        mine = {slot for slot in range(SLOTS) if living[slot % len(living)] == self.replica}
        while True:
            total = self.attempt(step, mine)
            if self.verdict(total):
                break
            record = {"step": step, "slots": sorted(mine), "complete": total is not None}
            census = self.world.repair(json.dumps(record).encode())
            self.note(census)
            records = {rank: json.loads(data) for rank, data in census.records.items()}
            assert {theirs.get("step") for theirs in records.values()} == {step}, f"steps differ: {records}"
            if all(theirs["complete"] for theirs in records.values()):
                break  # every survivor has the whole sum: commit, although somebody died since
            living = self.grid.replicas_of(census.members)
            held = {r: set(records[r * self.grid.replica_size]["slots"]) for r in living}
            for slot in sorted(set(range(SLOTS)) - set().union(*held.values())):
                poorest = min(living, key=lambda r: (len(held[r]), r))
                held[poorest].add(slot)
            mine = held[self.replica]
        assert total is not None, "committed without a sum"
        self.diary.commits[step] = (self.world.epoch, total)

    def verdict(self, total: frozenset[Any] | None) -> bool:
        return self.world.agree(total is not None) == 1

    def attempt(self, step: int, slots: set[int]) -> frozenset[Any] | None:
        """Exchange with the mates, reduce across replicas, exchange again. None if the reduction failed."""
        self.fabric.outside_protocol = True
        try:
            self.meet_mates()
            try:
                mark = self.world.epoch  # a stale part would carry another epoch
                return self.world.carrier.reduce(frozenset((step, slot, mark) for slot in slots))
            except CarrierError:
                return None
            finally:
                self.meet_mates()
        finally:
            self.fabric.outside_protocol = False

    def meet_mates(self) -> None:
        """A call inside the replica: a dead mate leaves the others blocked for ever, unless they leave."""
        key = ("mates", self.replica)
        arrivals = self.simulation.reductions.setdefault(key, {})
        arrivals[self.fabric.rank] = mine = arrivals.get(self.fabric.rank, 0) + 1
        mates = self.grid.mates(self.fabric.rank)
        self.fabric.wait("meeting its mates", lambda: all(arrivals.get(mate, 0) >= mine for mate in mates))

    def note(self, census: Census) -> None:
        living = set(range(self.grid.ranks)) - self.simulation.gone
        assert living <= set(census.members), (
            f"{living - set(census.members)} are left out, and may still act"
        )
        facts = (census.members, census.lost, tuple(sorted(census.records.items())))
        self.diary.censuses[census.epoch] = facts


def check(simulation: Simulation, diaries: list[Diary]) -> None:
    """The laws. Deaths may cost their own replica and nothing else; survivors hold one view and one sum."""
    grid, outcome = simulation.grid, simulation.finished
    culprits = {r for r, why in simulation.dead.items() if why in ("killed", "fenced")}
    # Whoever fails in so many rounds may be left out, and need not: there may be fewer repairs than that.
    sick = {r for r, (first, last, _) in simulation.sick.items() if last - first + 1 >= FAILURES}
    spoiled = {grid.replica(rank) for rank in culprits | sick}
    for rank, why in simulation.dead.items():
        assert why in ("killed", "fenced") or grid.replica(rank) in spoiled, f"bystander {rank} lost: {why}"
    if "no carrier" in outcome.values():
        # All give up, or none: and only if nobody can make a carrier, or no majority can build one.
        given_up = {rank for rank, how in outcome.items() if how == "no carrier"}
        assert given_up == set(outcome), f"some gave up and some did not: {outcome}"
        left = set(grid.replicas_of(given_up))
        cannot, fails = (
            left & set(grid.replicas_of(r for r in sick if simulation.sick[r][2] is can_be_made))
            for can_be_made in (False, True)
        )
        assert cannot == left or 2 * len(fails) >= len(left), f"{left} gave up, {cannot} cannot, {fails} fail"
        return
    survivors = [rank for rank in range(grid.ranks) if outcome.get(rank) == "done"]
    whole = [rank for rank in range(grid.ranks) if grid.replica(rank) not in spoiled]
    assert set(whole) <= set(survivors), f"lost without a cause: {set(whole) - set(survivors)}"
    # Among the survivors: what only the dead have seen (an agreement whose result died with them) binds nobody.
    for what in ("censuses", "commits"):
        for key in set().union(*(getattr(diaries[rank], what) for rank in survivors)):
            views: dict[Any, list[int]] = {}
            for rank in survivors:
                if key in getattr(diaries[rank], what):
                    entry = getattr(diaries[rank], what)[key]
                    views.setdefault(entry if what == "censuses" else entry[1], []).append(rank)
            assert len(views) == 1, f"{what} {key} differ: {views}"
    for rank in survivors:
        assert set(diaries[rank].commits) == set(range(STEPS))
    for diary in diaries:
        for step, (_, total) in diary.commits.items():
            slots = sorted(slot for _, slot, _ in total)
            assert slots == list(range(SLOTS)), f"step {step} committed slots {slots}"
            assert len({mark for _, _, mark in total}) == 1, f"step {step} mixes epochs: {total}"


@dataclass(frozen=True)
class Schedule:
    grid: Grid
    kills: dict[int, int]
    stalls: bool = False
    sick: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    reluctant: bool = False  # who is left out does not leave by itself


def random_schedule(seed: int) -> Schedule:
    """A world of 2 to 8 ranks and up to size-1 deaths, some of them in bursts, with now and then a stall.

    In one of four some rank's carriers fail: once or twice, or from some repair on for ever.
    """
    rng = random.Random(seed)
    replica_size = rng.choice((1, 1, 2))
    replicas = rng.randint(2, 8 // replica_size)
    grid = Grid(replicas, replica_size)
    victims = rng.sample(range(grid.ranks), rng.randint(0, grid.ranks - 1))
    burst = rng.randint(0, 60)
    kills = {v: rng.randint(0, 80) if rng.random() < 0.5 else burst + rng.randint(0, 6) for v in victims}
    stalls = rng.random() < 0.1
    sick = {}
    for rank in rng.sample(range(grid.ranks), rng.randint(1, 2)) if rng.random() < 0.25 else ():
        first = rng.randint(1, 4)
        sick[rank] = (first, rng.choice((first, first + 1, 10**6)), rng.random() < 0.5)
    return Schedule(grid, kills, stalls, sick, rng.random() < 0.1)


def large_schedule(seed: int) -> Schedule:
    """More ranks than a word of an agreement has bits, or (one in four) than two have; deaths above the first."""
    rng = random.Random(f"large/{seed}")
    replica_size = rng.choice((1, 2))
    ranks = rng.randint(WORD_BITS + 1, WORD_BITS + 5) if seed % 4 else 2 * WORD_BITS + 2
    grid = Grid(ranks // replica_size + 1, replica_size)
    victims = {*rng.sample(range(WORD_BITS, grid.ranks), 2), *rng.sample(range(grid.ranks), 1)}
    burst = rng.randint(0, 60)
    return Schedule(grid, {victim: burst + rng.randint(0, 6) for victim in sorted(victims)})


def play(
    seed: int,
    rank_class: type[Rank] = Rank,
    on_end: Callable[[Simulation], None] | None = None,
    draw: Callable[[int], Schedule] = random_schedule,
) -> None:
    """Run one schedule and check it."""
    schedule = draw(seed)
    grid = schedule.grid
    simulation = Simulation(grid, seed, schedule.kills, int(schedule.stalls), sick=schedule.sick)
    simulation.reluctant = schedule.reluctant
    diaries = [Diary() for _ in range(grid.ranks)]
    simulation.run(lambda fabric: rank_class(simulation, fabric, diaries[fabric.rank]).run())
    if on_end:
        on_end(simulation)
    check(simulation, diaries)
