"""A training run on the simulated world, and the laws that every schedule must keep.

World, watcher, transaction, buckets and journal are the ones that users run. What is made up is what they stand on: the
fabric, the carriers, the processes; and a model of which only one thing is known, namely which slots are in a sum. The
laws are checked over all that the ranks wrote down, the dead ones included.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from recover.fabrics.simulated import HangError, SimulatedFabric, Simulation
from recover.job.grid import Grid
from recover.job.spec import JobSpec
from recover.policy import SlotSet, get_policy
from recover.step.errors import OutOfRangeError, StateDivergedError
from recover.step.poison import PoisonedSampleError
from recover.step.transaction import Transaction
from recover.sums.buckets import Bucket
from recover.train.journal import Journal, do_despite_losses
from recover.world.membership import FAILURES, WORD_BITS, NoCarrierError
from recover.world.simulated_parts import simulated_parts
from recover.world.world import World

STEPS = 3
BATCH = 6
HANG_LIMIT = 2.0
ENDS = {
    NoCarrierError: "no carrier",
    StateDivergedError: "diverged",
    PoisonedSampleError: "poisoned",
    OutOfRangeError: "out of range",
}


@dataclass(frozen=True)
class Schedule:
    """What happens to whom. Every field but the first three is a fault that can be left out."""

    seed: int
    grid: Grid
    policy: str = "balanced"
    kills: dict[int, int] = field(default_factory=dict)  # rank: after so many calls
    stops: dict[int, int] = field(default_factory=dict)  # ... it is stopped, for ever
    stalls: int = 0  # agreements that forget to tell one rank
    sick: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    reluctant: bool = False  # who is left out does not leave by itself
    drifts: dict[int, int] = field(
        default_factory=dict
    )  # rank: the step before which a bit of its state flips
    leaves: dict[int, int] = field(default_factory=dict)  # rank: the step that it leaves early, once
    poison: tuple[int, int] | None = None  # (step, slot): whoever computes it raises
    too_large: tuple[int, int] | None = None  # (step, slot): its gradient cannot be summed exactly
    asks_to_stop: tuple[int, int] | None = None  # (rank, step)


class Sums:
    """A microbatch leaves a mark in the place of its slot: a missing, doubled or stale one shows in the sum."""

    unit = loss_unit = 1.0

    def __init__(self, slots: int) -> None:
        self.sum, self.parameters, self.usage, self.in_range = self, [0], [1.0], True
        self.buckets = [Bucket(np.zeros(slots)) for _ in range(2)]

    def begin(self) -> None:
        self.clear()
        for bucket in self.buckets:
            bucket.forget()

    def clear(self) -> None:
        self.in_range = True
        for bucket in self.buckets:
            bucket.local[:] = 0.0
            bucket.held = SlotSet()

    def run(self, slots: Sequence[int], mark: float) -> None:
        for bucket in self.buckets:
            for slot in slots:
                bucket.local[slot] += mark
                bucket.held = bucket.held | SlotSet.span(slot, slot + 1)

    def post_all(self, post: Callable[[int, Bucket], None]) -> None:
        for index, bucket in enumerate(self.buckets):
            post(index, bucket)

    def rewind(self, overlapped: bool) -> None:
        for bucket in self.buckets:
            bucket.rewind()

    def squared_norm(self) -> float:
        return float(sum((bucket.result**2).sum() for bucket in self.buckets))

    def loss(self, value: float) -> float:
        return value

    def covers(self, value: float) -> bool:
        return True

    def explain(self, step: int) -> str:
        return f"step {step} cannot be summed"


class NoBuffers:
    size, changes = 0, np.zeros(0)

    def begin(self) -> None:
        pass

    def clear(self) -> None:
        pass


class Mates:
    """The inside of a replica: a dead mate leaves the others blocked for ever, unless they leave."""

    def __init__(self, simulation: Simulation, fabric: SimulatedFabric) -> None:
        self._replica, self._mates = simulation.grid.replica(fabric.rank), simulation.grid.mates(fabric.rank)
        self.size = simulation.grid.replica_size
        self._simulation, self._fabric, self._calls = simulation, fabric, 0

    def combine_numbers(self, values: list[float]) -> list[float]:
        self._calls += 1
        parts = self._simulation.reductions.setdefault(("mates", self._replica, self._calls), {})
        parts[self._fabric.rank] = values
        self._fabric.wait("meeting its mates", lambda: parts.keys() >= self._mates)
        total: list[float] = np.sum([parts[rank] for rank in sorted(parts)], axis=0).tolist()
        return total


class NoSinks:
    def log(self, kept: object) -> None:
        pass


class LeftEarly(Exception):
    pass


@dataclass
class Diary:
    """What a rank wrote down: its censuses, by epoch, and its commits, by step."""

    censuses: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    commits: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    raised: set[str] = field(default_factory=set)


class Rank:
    """One virtual rank's training run, as `recover.Step` and the trainer have it."""

    def __init__(
        self, schedule: Schedule, simulation: Simulation, fabric: SimulatedFabric, diary: Diary, run_dir: Path
    ) -> None:
        self.schedule, self.simulation, self.fabric, self.diary = schedule, simulation, fabric, diary
        self.grid, self.rank, self.run_dir = simulation.grid, fabric.rank, run_dir
        self.leaves = dict(schedule.leaves)
        self.state = 0

    def run(self) -> str:
        parts = simulated_parts(self.simulation, self.fabric)
        job = JobSpec(self.grid.ranks, self.grid.replica_size, hang_limit=HANG_LIMIT, token="simulated")
        try:
            self.world = World(job, self.grid, parts)
            self.begin_training()
            while self.number < STEPS and not self.transaction.stop_agreed:
                self.step(self.number + 1)
            do_despite_losses(self.world, self.journal.write, lambda lost, seconds: None)
            parts.own.succeed()  # type: ignore[attr-defined]
        except tuple(ENDS) as error:
            return ENDS[type(error)]
        finally:
            self.note()
        return "done"

    def begin_training(self) -> None:
        slots = 2 * max(BATCH, self.grid.replicas)
        self.sums, self.mates, self.number = Sums(slots), Mates(self.simulation, self.fabric), 0
        self.transaction = Transaction(
            self.world,
            self.sums,  # type: ignore[arg-type]
            get_policy(self.schedule.policy, self.grid.replicas),
            BATCH,
            self.mates,  # type: ignore[arg-type]
            NoBuffers(),  # type: ignore[arg-type]
        )
        self.journal = Journal(self.run_dir, self.world, NoSinks())  # type: ignore[arg-type]

    def step(self, number: int) -> None:
        if self.schedule.drifts.get(self.rank) == number:
            self.state += 1
        if self.schedule.asks_to_stop == (self.rank, number):
            self.transaction.stop_requested = True
        rounds = self.schedule.seed % 2  # a pipeline runs all that it owes at once
        cut = (lambda slots: [slots] if slots else []) if rounds else (lambda slots: [[s] for s in slots])
        try:
            with self.world.step(number):
                self.transaction.begin(number, number + 1000 * self.state)
                for slots, _, post in self.transaction.attempts(cut, not rounds, lambda: None):
                    self.compute(number, slots)
                    if post:
                        self.sums.post_all(self.transaction.post)
                self.commit(number)
        except LeftEarly:  # as `Step._leave` does it
            self.world.cross.break_off("a replica has left its step early")
            self.transaction.leave()
        self.note()

    def compute(self, number: int, slots: Sequence[int]) -> None:
        samples = [(slot, (number - 1) * BATCH + slot) for slot in slots]
        self.world.board.compute(self.rank, samples)
        self.mates.combine_numbers([0.0])  # what goes on inside a replica
        if self.leaves.pop(self.rank, None) == number and self.grid.replica_size == 1:
            raise LeftEarly
        for slot, sample in samples:
            self.fabric.wait(f"computing slot {slot}")
            if self.schedule.poison == (number, slot):
                self.diary.raised.add("poison")
                self.world.notes.leave(number, samples, "it raised")
                self.world._own.die("raised", "this sample cannot be read")
            if self.schedule.too_large == (number, slot):
                self.sums.in_range = False
            self.transaction.finish_slot(slot, sample, 1.0, 1.0)
        self.sums.run(slots, number)
        self.world.board.touch(self.rank)
        self.world.board.compute(self.rank, ())

    def commit(self, number: int) -> None:
        totals = self.transaction.totals
        result = tuple(tuple(bucket.result.tolist()) for bucket in self.sums.buckets)
        self.diary.commits[number] = (tuple(totals.samples), result, totals.weight)
        self.state = hash((self.state, result)) % 997
        self.number = number
        self.world.board.accomplish(self.rank)
        line = {"step": number, "epoch": self.world.epoch, "samples": totals.samples, "seconds": 0.0}
        incidents = [
            {"step": i.step, "epoch": i.epoch, "dead_ranks": list(i.dead_ranks)}
            for i in self.transaction.incidents
        ]
        self.journal.commit(line, incidents)  # type: ignore[arg-type]

    def note(self) -> None:
        if hasattr(self, "world"):
            census = self.world.last_census
            living = set(range(self.grid.ranks)) - self.simulation.gone
            outside = living - set(census.members) - self.simulation.stopped
            if self.world.epoch not in self.diary.censuses:
                assert not outside, f"{outside} are left out, and may still act"
            self.diary.censuses[census.epoch] = (census.members, census.lost)


def check(schedule: Schedule, simulation: Simulation, diaries: list[Diary], run_dir: Path) -> None:
    """The laws. Faults may cost their own replica and nothing else; survivors hold one view and one sum."""
    grid, outcome = simulation.grid, simulation.finished
    sick = {r for r, (first, last, _) in simulation.sick.items() if last - first + 1 >= FAILURES}
    struck = {r for r, why in simulation.dead.items() if why == "killed"} | simulation.stopped | sick
    struck |= set(schedule.drifts) | {r for r, diary in enumerate(diaries) if diary.raised}
    if schedule.stalls:
        struck |= {r for r, why in simulation.dead.items() if why == "fenced"}
    spoiled = {grid.replica(rank) for rank in struck}
    survivors, ends = sorted(outcome), set(outcome.values())
    assert len(ends) <= 1, f"the survivors have come to different ends: {outcome}"
    if ends - {"done"}:  # all end by it: who comes to it a moment later than a mate may see that one go
        spoiled |= {grid.replica(rank) for rank in survivors}
    for rank, why in simulation.dead.items():
        assert grid.replica(rank) in spoiled, f"bystander {rank} lost: {why}"
    whole = [rank for rank in range(grid.ranks) if grid.replica(rank) not in spoiled]
    assert set(whole) <= set(survivors), f"lost without a cause: {set(whole) - set(survivors)}"
    allowed = {"done"}
    allowed |= {"no carrier"} if sick else set()
    allowed |= {"diverged"} if schedule.drifts else set()
    allowed |= {"poisoned"} if schedule.poison else set()
    allowed |= {"out of range"} if schedule.too_large else set()
    assert ends <= allowed, f"{ends} without a cause"
    # Among the survivors: what only the dead have seen (an agreement whose result died with them) binds nobody.
    for what in ("censuses", "commits"):
        for key in set().union(*(getattr(diaries[rank], what) for rank in survivors)):
            views: dict[Any, list[int]] = {}
            for rank in survivors:
                if key in getattr(diaries[rank], what):
                    entry = getattr(diaries[rank], what)[key]
                    # The sums of a spare's peers differ in nothing; those of other shards have other numbers.
                    views.setdefault(entry, []).append(rank)
            assert len(views) == 1, f"{what} {key} differ: {views}"
    for number, commit in {n: c for diary in diaries for n, c in diary.commits.items()}.items():
        samples, result, weight = commit
        assert weight == BATCH, f"step {number} was taken on {weight} microbatches"
        if schedule.policy == "balanced":
            assert samples == tuple(range((number - 1) * BATCH, number * BATCH)), f"step {number}: {samples}"
        for sums in result:
            counted = [value for value in sums if value]
            assert counted == [number] * BATCH, f"step {number} has the sum {sums}"
    if ends == {"done"}:
        commits = {tuple(diaries[rank].commits) for rank in survivors}
        assert len(commits) == 1, f"the survivors have committed different steps: {commits}"
        (numbers,) = commits
        last = numbers[-1] if numbers else 0
        assert numbers == tuple(range(1, last + 1))
        asked = schedule.asks_to_stop
        assert last == STEPS or asked, f"the run ended after step {last}"
        if asked and asked[0] in survivors:
            assert last == min(STEPS, asked[1]), f"step {asked[1]} was to be the last, and {last} is"
        if survivors:
            _check_journal(run_dir, last)


def _check_journal(run_dir: Path, last: int) -> None:
    lines = [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, last + 1)), f"the journal has {lines}"


def random_schedule(seed: int) -> Schedule:
    """A world of 2 to 8 ranks: deaths, some of them in bursts, and now and then something rarer."""
    rng = random.Random(seed)
    replica_size = rng.choice((1, 1, 2))
    grid = Grid(rng.randint(2, 8 // replica_size), replica_size)
    ranks = range(grid.ranks)
    victims = rng.sample(ranks, rng.randint(0, grid.ranks - 1))
    burst = rng.randint(0, 90)
    kills = {v: rng.randint(0, 120) if rng.random() < 0.5 else burst + rng.randint(0, 6) for v in victims}
    sick = {}
    for rank in rng.sample(ranks, rng.randint(1, 2)) if rng.random() < 0.2 else ():
        first = rng.randint(1, 4)
        sick[rank] = (first, rng.choice((first, first + 1, 10**6)), rng.random() < 0.5)

    def sometimes(share: float, make: Callable[[], Any], otherwise: Any) -> Any:
        return make() if rng.random() < share else otherwise

    def place() -> tuple[int, int]:
        return rng.randint(1, STEPS), rng.randrange(BATCH)

    return Schedule(
        seed,
        grid,
        rng.choice(("balanced", "balanced", "static")),
        kills,
        stops=sometimes(0.1, lambda: {rng.choice(ranks): rng.randint(5, 100)}, {}),
        stalls=sometimes(0.1, lambda: 1, 0),
        sick=sick,
        reluctant=rng.random() < 0.1,
        drifts=sometimes(0.15, lambda: {rng.choice(ranks): rng.randint(2, STEPS)}, {}),
        leaves=sometimes(0.15, lambda: dict.fromkeys(rng.sample(ranks, 2), rng.randint(1, STEPS)), {}),
        poison=sometimes(0.08, place, None),
        too_large=sometimes(0.05, place, None),
        asks_to_stop=sometimes(0.15, lambda: (rng.choice(ranks), rng.randint(1, STEPS)), None),
    )


def large_schedule(seed: int) -> Schedule:
    """More ranks than a word of an agreement has bits, or (one in four) than two have; deaths above the first."""
    rng = random.Random(f"large/{seed}")
    replica_size = rng.choice((1, 2))
    ranks = rng.randint(WORD_BITS + 1, WORD_BITS + 5) if seed % 4 else 2 * WORD_BITS + 2
    grid = Grid(ranks // replica_size + 1, replica_size)
    victims = {*rng.sample(range(WORD_BITS, grid.ranks), 2), *rng.sample(range(grid.ranks), 1)}
    burst = rng.randint(0, 60)
    return Schedule(seed, grid, kills={victim: burst + rng.randint(0, 6) for victim in sorted(victims)})


def play(schedule: Schedule, rank_class: type[Rank] = Rank) -> Simulation:
    """Run one schedule and check it. Raises AssertionError or HangError."""
    simulation = Simulation(
        schedule.grid,
        schedule.seed,
        schedule.kills,
        schedule.stalls,
        sick=schedule.sick,
        stops=schedule.stops,
    )
    simulation.reluctant = schedule.reluctant
    diaries = [Diary() for _ in range(schedule.grid.ranks)]
    with tempfile.TemporaryDirectory(prefix="simulated-", dir=MEMORY) as directory:
        run_dir = Path(directory)
        simulation.run(
            lambda fabric: rank_class(schedule, simulation, fabric, diaries[fabric.rank], run_dir).run()
        )
        check(schedule, simulation, diaries, run_dir)
    return simulation


MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def violation(schedule: Schedule, rank_class: type[Rank] = Rank) -> str | None:
    """What is wrong with a schedule, if anything is."""
    try:
        play(schedule, rank_class)
    except (AssertionError, HangError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def shrink(schedule: Schedule, rank_class: type[Rank] = Rank) -> Schedule:
    """The same violation (or another) with as few faults as can be found by leaving out one after the other."""
    smaller = True
    while smaller:
        smaller = False
        for less in _without_one_fault(schedule):
            if violation(less, rank_class):
                schedule, smaller = less, True
                break
    return schedule


def _without_one_fault(schedule: Schedule) -> list[Schedule]:
    found = []
    for fault in fields(schedule)[3:]:
        value = getattr(schedule, fault.name)
        if isinstance(value, dict):
            found += [
                replace(schedule, **{fault.name: {k: v for k, v in value.items() if k != key}})
                for key in value
            ]
        elif value:
            found.append(replace(schedule, **{fault.name: type(value)() if isinstance(value, int) else None}))
    return found
