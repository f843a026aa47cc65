"""A training run on the simulated world, as one rank runs it; `simulated_laws` has the laws of every schedule.

World, watcher, transaction, buckets and journal are the ones that users run. The fabric, the carriers and the
processes below them are simulated, and so is the model: of it only one thing is known, namely which slots are in a
sum.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from recover_lab.simulated_world.parts import simulated_parts
from recover_lab.simulated_world.scheduler import SimulatedFabric, Simulation
from simulated_schedules import BATCH, Schedule

from recover.gradients.buckets import Bucket
from recover.gradients.exponents import Exponents
from recover.job.spec import JobSpec
from recover.policy import Layout, SlotSet, get_policy
from recover.runs.writing.journal import Journal
from recover.step.errors import CorruptGradientError, StateDivergedError
from recover.step.incident import Incident
from recover.step.joining.admission import admit_replicas, begin_join, complete_join
from recover.step.joining.joining_rank import REST, STATE, UPDATE, JoiningRank, NobodyHoldsTheStateError
from recover.step.joining.numbers import from_bits, to_bits
from recover.step.joining.stripes import Stripes
from recover.step.poisoned_sample import PoisonedSampleError
from recover.step.record import Arrival, arrivals_of
from recover.step.sum_check import SumCheck
from recover.step.transaction import Transaction
from recover.step.verification import Verification
from recover.world.calls import Call
from recover.world.census import Census
from recover.world.hooks import NoHooks
from recover.world.membership import NoCarrierError
from recover.world.retry import retry_after_repair
from recover.world.world import World

HANG_LIMIT = 2.0
BUCKETS = 2
NOTHING = np.zeros(1 + BUCKETS)  # largest loss, and largest value per parameter, of no microbatch
SHARE = 43  # bytes of state
ENTRIES = 3  # entries of the state, which are handed over one by one in instalments
LARGE = 2.0**90  # a value that no exponent of the steps before covers
WRONG = 2.0**-20  # what a device that errs adds to a mark, once or several times
FLIPPED = 2.0  # what a flipped bit of a sum adds to it
FINEST = 2.0**-30
DRIFTED = 0.5  # what a replica whose state has drifted adds to its marks
ENDS = {
    NoCarrierError: "no carrier",
    StateDivergedError: "diverged",
    PoisonedSampleError: "poisoned",
    NobodyHoldsTheStateError: "nobody holds the state",
    CorruptGradientError: "corrupt",
}


class Sums:
    """Gradient buckets in which a microbatch leaves a mark in the place of its slot: a missing, doubled or stale mark
    shows in the sum. Each bucket is a parameter with an exponent of its own."""

    exact = True
    unread = ()  # plain numbers are known at once

    def __init__(self, slots: int) -> None:
        self.sum, self.parameters, self.usage, self.largest = self, [0], [1.0], NOTHING
        self.exponents = Exponents(BATCH, [f"bucket {number}" for number in range(BUCKETS)])
        self.buckets = [Bucket(np.zeros(slots)) for _ in range(BUCKETS)]

    def begin(self) -> None:
        self.clear()
        for bucket in self.buckets:
            bucket.forget()

    @property
    def results(self) -> list[Any]:
        """The reduced sums, as values."""
        return [bucket.result * unit for bucket, unit in zip(self.buckets, self._units, strict=True)]

    @property
    def _units(self) -> Any:
        return self.exponents.grids[1 : 1 + BUCKETS]

    def clear(self) -> None:
        self.largest, self._added = NOTHING, 0
        for bucket in self.buckets:
            bucket.local[:] = 0.0
            bucket.held = SlotSet()

    def run(self, marks: dict[int, float]) -> None:
        for bucket, unit in zip(self.buckets, self._units, strict=True):
            for slot, mark in marks.items():
                bucket.local[slot] += mark / unit
                self._added += int(mark / FINEST)
                bucket.held = bucket.held | SlotSet.span(slot, slot + 1)

    # The checksums that `SumCheck` compares: plain sums, which suffice for marks that never cancel out. Marks are not
    # rounded to the grid of a large value, as gradients are, but all of them are multiples of FINEST.

    @property
    def checksum_added(self) -> int:
        return self._added

    def checksum_of(self, which: str) -> int | None:
        sums = [getattr(bucket, which) * unit for bucket, unit in zip(self.buckets, self._units, strict=True)]
        return sum(int(each.sum() / FINEST) for each in sums)

    def post_all(self, post: Callable[[int, Bucket], None]) -> None:
        for index, bucket in enumerate(self.buckets):
            post(index, bucket)

    def rewind(self, overlapped: bool) -> None:
        for bucket in self.buckets:
            bucket.rewind()

    def squared_norms(self) -> list[float]:
        if not all(bucket.is_coming() for bucket in self.buckets):
            return [0.0]
        return [float(sum((result**2).sum() for result in self.results))]

    def loss(self, value: float) -> float:
        return value


class NoBuffers:
    size, changes, largest, unread = 0, np.zeros(0), (), ()

    def begin(self) -> None:
        pass

    def clear(self) -> None:
        pass


class ReplicaPeers:
    """Collective operations inside a replica: a dead peer leaves the others blocked for ever, unless they leave."""

    def __init__(self, simulation: Simulation, fabric: SimulatedFabric) -> None:
        self._replica, self._peers = (
            simulation.grid.replica(fabric.rank),
            simulation.grid.replica_peers(fabric.rank),
        )
        self.size = simulation.grid.replica_size
        self._simulation, self._fabric, self._calls = simulation, fabric, 0

    def combine_numbers(self, values: list[float]) -> list[float]:
        total: list[float] = np.sum(self._exchange(values), axis=0).tolist()
        return total

    def combine_max(self, values: list[int]) -> list[int]:
        if self.size == 1:
            return values
        largest: list[int] = np.max(self._exchange(values), axis=0).tolist()
        return largest

    def _exchange(self, values: Sequence[float]) -> list[Sequence[float]]:
        self._calls += 1
        parts = self._simulation.reductions.setdefault(("peers", self._replica, self._calls), {})
        parts[self._fabric.rank] = values
        self._fabric.wait("meeting its peers", lambda: parts.keys() >= self._peers)
        return [parts[rank] for rank in sorted(parts)]


class LeftEarly(Exception):
    pass


class Place(NoHooks):
    """The place that a rank is at, by the names at which real faults strike; and `aim`, the (step, place) at which it
    is killed (step 0 is any step).

    A reduction is run where it is posted, so that it is under way before its own name is heard.
    """

    def __init__(
        self, simulation: Simulation, fabric: SimulatedFabric, aim: tuple[int, str] | None = None
    ) -> None:
        self._simulation, self._fabric, self._aim = simulation, fabric, aim
        self._at = "start-up"
        self.when_reduced: Callable[[], None] = lambda: None

    def __call__(self, location: str, detail: object = None) -> None:
        self._at = f"{location}:{detail}" if location == "repair" else location
        if location == "reduced":
            self.when_reduced()
        if self._strike(self._at):
            self._fabric.wait(f"at {self._at}")
        if location == "bucket":
            self._strike("in-reduce")

    def under_way(self, location: str, work: Any = None, detail: object = None) -> None:
        self._at = f"{location}:{detail}" if location == "repair" else location
        if location in ("repair", "in-instalment") and self._strike(self._at):
            self._fabric.wait(f"at {self._at}")
        if (location, detail) == ("in-reduce", BUCKETS - 1):
            self._strike("in-totals")

    def _strike(self, place: str) -> bool:
        if self._aim not in ((self.step, place), (0, place)):
            return False
        self._simulation.kill_at_next_call(self._fabric.rank)
        return True

    def __str__(self) -> str:
        if self._fabric.doing == "in a reduction":
            return {"bucket": "in-reduce", "in-reduce": "in-totals"}.get(self._at, self._at)
        return self._at


@dataclass
class Diary:
    """Notes of a rank: its censuses, by epoch, and its commits, by step."""

    censuses: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    commits: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    incidents: list[tuple[Layout, list[Incident]]] = field(default_factory=list)
    flaws: dict[int, float] = field(default_factory=dict)  # the flaw of its state, by step
    verified: dict[int, tuple[int, ...]] = field(default_factory=dict)  # verified slots, by step
    raised: set[str] = field(default_factory=set)
    computed: int = 0  # computed microbatches, those that did not count included
    members: tuple[int, ...] = ()  # the members at the end of the journal
    group: tuple[int, ...] = ()  # the same, with joining ranks that do not hold the state
    place: Place | None = None


class Rank:
    """One virtual rank's training run, as `recover.Step` and the trainer have it."""

    def __init__(
        self, schedule: Schedule, simulation: Simulation, fabric: SimulatedFabric, diary: Diary, run_dir: Path
    ) -> None:
        self.schedule, self.simulation, self.fabric, self.diary = schedule, simulation, fabric, diary
        self.grid, self.rank, self.run_dir = simulation.grid, fabric.rank, run_dir
        self.leaves = dict(schedule.leaves)
        self.arrived: list[Incident] = []
        self.entries = [0] * ENTRIES
        self.flaw = 0.0  # of a state that has drifted, or was received from a drifted replica
        self.joining = fabric.rank >= self.grid.ranks

    @property
    def state(self) -> int:
        return hash(tuple(self.entries)) % 997

    def run(self) -> str:
        aim = self.schedule.aims.get(self.rank)
        self.diary.place = Place(self.simulation, self.fabric, aim)
        parts = replace(simulated_parts(self.simulation, self.fabric), hooks=self.diary.place)
        job = JobSpec(
            self.grid.ranks,
            self.grid.replica_size,
            hang_limit=HANG_LIMIT,
            token="simulated",
            joining=self.joining,
        )
        try:
            self.world = World(job, self.grid, parts)
            self.note(self.world.last_census)
            repair = self.world.repair
            self.world.repair = lambda *how, **more: self.note(repair(*how, **more))  # type: ignore[method-assign]
            self.begin_training()
            if self.joining:
                self.join()
            while self.number < self.schedule.steps and not self.transaction.stop_agreed:
                before = self.number
                self.step(before + 1)
                if self.schedule.instalments and self.number > before and self.number % 3 == 0:
                    self.confirm()
            retry_after_repair(self.world, Call.TRAIN_END, self.close, self.lost)
            self.diary.members = self.world.members
            self.diary.group = self.world.last_census.members
            parts.own.succeed()  # type: ignore[attr-defined]
        except tuple(ENDS) as error:
            return ENDS[type(error)]
        return "done"

    def begin_training(self) -> None:
        slots = 2 * max(BATCH, self.grid.replicas)
        self.sums, self.peers, self.number = Sums(slots), ReplicaPeers(self.simulation, self.fabric), 0
        self.transaction = Transaction(
            self.world,
            self.sums,  # type: ignore[arg-type]
            get_policy(self.schedule.policy, self.grid.replicas),
            BATCH,
            self.peers,  # type: ignore[arg-type]
            NoBuffers(),  # type: ignore[arg-type]
            leave_asked=lambda: self.rank in self.simulation.noticed,
            verification=Verification(self.schedule.verify, at_start=not self.joining),
            tell_attempt=self.give_instalment,
            sum_check=SumCheck(self.sums if self.schedule.verify else None),
        )
        self.flips = 0
        self.diary.place.when_reduced = lambda: self.flip("result")  # type: ignore[union-attr]
        self.last_update: dict[str, Any] = {"step": 0}
        self.given, self.given_in = set[int](), 0
        self.held, self.ready, self.applied, self.summed = set[int](), False, None, None
        self.errors, self.draws = 0, random.Random(self.schedule.seed)
        self.journal = Journal(self.run_dir, self.world)

    def join(self) -> None:
        """Join as `Step` does: warm up alone, ask, receive the state of the others."""
        if self.world.replica not in self.schedule.joins:
            self.world._own.die("unneeded", "a number that nobody has")
        for _ in range(self.schedule.joins[self.world.replica]):
            self.fabric.wait("warming up")
        self.peers.combine_numbers([0.0])
        self.arrived = JoiningRank(self.transaction, Arrival("", 0.0), self).join()

    # The interface of `Receiver` in `recover.step.joining.joining_rank`, for a joining rank.

    @property
    def buckets(self) -> list[Bucket]:
        return self.sums.buckets

    @property
    def holds(self) -> str:
        return to_bits(self.held)

    def take_instalment(self, command: dict[str, Any]) -> bool:
        """Receive an instalment as `StateReceiver` does."""
        self.held -= set(command["numbers"])
        rows = [np.zeros(8, np.uint8) for _ in command["numbers"]]
        if not self._stripes((self.world.coordinator,), self.world.takers, "in-instalment").take(rows):
            return False
        update = command["committed"]
        if self.applied not in (None, update["step"]):
            assert self.summed == update["step"], "it has missed the sums of a step"
            self.sums.exponents.adopt(update["exponents"])
            self.apply(self.held, self.result())
        self.applied, self.summed, self.ready = update["step"], command["step"], command["ready"]
        for number, row in zip(command["numbers"], rows, strict=True):
            self.entries[number] = int(row.view(np.int64)[0])
            self.held.add(number)
        return True

    def take_update(self, command: dict[str, Any]) -> bool:
        update = command["committed"]
        if self.applied != update["step"]:
            assert self.summed == update["step"], "it has missed the sums of a step"
            self.sums.exponents.adopt(update["exponents"])
            self.apply(self.held, self.result())
            self.applied = update["step"]
        return True

    def take_state(self, command: dict[str, Any]) -> int | None:
        if command["do"] == STATE:
            return self.take(self.world.members)
        return self.take((self.world.coordinator,), from_bits(command["held"]))

    def take(self, givers: tuple[int, ...], kept: frozenset[int] = frozenset()) -> int | None:
        stripes, rest = self._stripes(givers, self.world.takers), np.zeros(SHARE, np.uint8)
        head = stripes.receive_head()
        if head is None or not stripes.take([rest[:5], rest[5:]]):
            return None
        told = json.loads(head)
        self.number, self.flaw, self.journal_so_far = told["number"], told["flaw"], told["journal"]
        assert self.applied in (None, self.number - 1, self.number)
        if kept and self.applied == self.number - 1:
            assert self.summed == self.number, "it has missed the sums of the last step"
            self.sums.exponents.adopt(told["update"]["exponents"])
            self.apply(kept, self.result())
        self.applied = self.number
        # Bytes that arrive damaged spoil the state.
        for number in set(range(ENTRIES)) - kept:
            self.entries[number] = told["entries"][number] if (rest == 7).all() else -1
        self.sums.exponents.load_state_dict(told["exponents"])
        self.transaction.policy.load_state_dict(ast.literal_eval(told["policy"]))
        self.transaction.adopt_step(self.number + 1)
        self.world.board.catch_up(self.rank, told["votes"], self.number + 1)
        return SHARE

    def _stripes(self, givers: tuple[int, ...], takers: tuple[int, ...], place: str = "") -> Stripes:
        def told(work: Any) -> None:
            self.world.hooks.under_way(*((place, work) if place else ("repair", work, "in-state")))

        return Stripes(self.world.cross, givers, takers, under_way=told)

    # Methods of members.

    def give_all(self, givers: tuple[int, ...], takers: tuple[int, ...], told: Any) -> int | None:
        self.world.tell({"do": STATE, **told})
        return self.give(givers, takers)

    def give_rest(self, givers: tuple[int, ...], takers: tuple[int, ...], told: Any) -> int | None:
        kept = self.kept_by_takers()
        if not self.world.tell({"do": REST, "held": to_bits(kept), **told}):
            return 0
        return self.give((self.rank,), takers)

    def give(self, givers: tuple[int, ...], takers: tuple[int, ...]) -> int | None:
        stripes = self._stripes(givers, takers)
        head = {
            "number": self.number,
            "flaw": self.flaw,
            "entries": self.entries,
            "update": self.last_update,
            "votes": self.world.board.votes(self.rank),
            "journal": self.journal.state_dict(),
            "exponents": self.sums.exponents.state_dict(),
            "policy": repr(self.transaction.policy.state_dict()),  # JSON has no numbers as keys
        }
        rest = np.full(SHARE, 7, np.uint8)
        return SHARE if stripes.send_head(json.dumps(head).encode()) and stripes.give([rest]) else None

    def give_instalment(self, command: dict[str, Any]) -> None:
        """Send an instalment as `InstalmentGiver` does: one entry with each attempt."""
        left = [number for number in range(ENTRIES) if number not in self.kept_by_takers()]
        numbers = left[:1]
        more = {"committed": self.last_update, "numbers": numbers, "ready": left == numbers}
        self.world.tell(command | more)
        self.world.hooks("instalment")
        rows = [np.array([self.entries[number]], np.int64).view(np.uint8) for number in numbers]
        stripes = self._stripes((self.rank,), self.world.takers, "in-instalment")
        stripes.give(rows, wait=False)
        self.given.update(numbers)

    def kept_by_takers(self) -> frozenset[int]:
        if self.given_in != self.world.epoch:
            self.given_in, takers = self.world.epoch, arrivals_of(self.world.last_census.records)
            self.given = set(
                frozenset.intersection(*(from_bits(takers[rank].holds) for rank in self.world.takers))
            )
        return frozenset(self.given)

    def result(self) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(each.tolist()) for each in self.sums.results)

    def apply(self, numbers: Collection[int], result: Any) -> None:
        """Update the state: the new value of each entry depends on the sums and on its old value."""
        for number in numbers:
            self.entries[number] = hash((self.entries[number], result)) % 997

    def step(self, number: int) -> None:
        if self.schedule.drifts.get(self.rank) == number:
            self.entries[-1] += 1
        if has_drifted(self.schedule, self.world.replica, number):
            self.flaw = DRIFTED
        if self.schedule.asks_to_stop == (self.rank, number):
            self.transaction.request_stop()
        self.world.hooks.step = number
        rounds = self.schedule.seed % 2  # a pipeline runs all of its slots at once
        cut = (lambda slots: [slots] if slots else []) if rounds else (lambda slots: [[s] for s in slots])
        try:
            with self.world.step(number):
                self.transaction.begin(number, number + 1000 * self.state)
                ready = self.transaction.take_ready()
                if leaving := self.transaction.take_leavers():
                    incidents = [self.transaction.let_leave(leaving)]
                    self.transaction.begin(number, number + 1000 * self.state, incidents)
                elif self.transaction.take_join_request():
                    incidents = (
                        begin_join(self.transaction)
                        if self.schedule.instalments
                        else admit_replicas(self.transaction, self.give_all)
                    )
                    self.transaction.begin(number, number + 1000 * self.state, incidents)
                elif ready:
                    incidents = complete_join(self.transaction, self.give_rest)
                    self.transaction.begin(number, number + 1000 * self.state, incidents)
                elif self.arrived:
                    self.journal.load_state_dict(self.journal_so_far)
                    self.transaction.begin(number, number + 1000 * self.state, self.arrived)
                    self.arrived = []
                for slots, place, post in self.transaction.attempts(cut, not rounds, lambda: None):
                    self.world.hooks(place)
                    self.compute(number, slots, counts=place != "check")
                    if post:
                        self.sums.post_all(self.transaction.post)
                self.commit(number)
        except LeftEarly:  # as `StepEngine._leave` does it
            self.world.cross.abort_operations("a replica has left its step early")
            self.transaction.leave()

    def confirm(self) -> None:
        """Do what `Step.confirm` does: agreements and sums outside of a step, in which joining ranks take part."""
        following = self.number + 1
        with self.world.call(Call.CONFIRM, self.lost):
            lost, seconds = self.transaction.confirm(following, following + 1000 * self.state)
        if lost:
            self.lost(lost, seconds)

    def compute(self, number: int, slots: Sequence[int], counts: bool) -> None:
        samples = [(slot, (number - 1) * BATCH + slot) for slot in slots]
        self.world.board.compute(self.rank, samples)
        self.peers.combine_numbers([0.0])  # communication inside the replica
        if self.leaves.get(self.rank) == number and self.grid.replica_size == 1:
            del self.leaves[self.rank]
            raise LeftEarly
        marks: dict[int, float] = {}
        for slot, sample in samples:
            self.fabric.wait(f"computing slot {slot}")
            if self.schedule.poison == (number, slot):
                self.diary.raised.add("poison")
                self.world.notes.leave(number, samples, "it raised")
                self.world._own.die("raised", "this sample cannot be read")
            mark = marks[slot] = number + self.flaw + self.error(number)
            mine = mark if self.rank in self.schedule.errs else number + self.flaw
            self.note_result(slot, int(mine / WRONG) * BATCH + slot, counts)
            if not counts:
                continue
            large = self.schedule.too_large == (number, slot)
            # Only the first parameter has the large value.
            magnitudes = [0.0, LARGE if large else float(number), *[float(number)] * (BUCKETS - 1)]
            self.sums.largest = np.maximum(self.sums.largest, magnitudes)
            self.transaction.attempt.finish_slot(slot, sample, 1.0, 1.0)
            self.diary.computed += 1
        # Ranks of a replica measure different times, and replicas change their speed.
        seconds = random.Random(f"{self.schedule.seed}/{self.rank}/{number}").uniform(0.1, 1.0) * len(slots)
        self.transaction.attempt.computed(seconds, len(slots))
        if counts:
            self.sums.run(marks)
            self.flip("local")
        self.world.board.touch(self.rank)
        self.world.board.compute(self.rank, ())

    def error(self, number: int) -> float:
        """The error that the device adds to the mark of a microbatch: the same on all ranks of a replica, whichever of
        them errs, as a wrong value spreads."""
        for rank, (since, share, times, is_steady) in self.schedule.errs.items():
            if self.grid.replica(rank) != self.world.replica or number < since or self.errors >= times:
                continue
            if self.draws.random() < share:
                self.errors += 1
                return WRONG * (1 if is_steady else self.errors)
        return 0.0

    def flip(self, which: str) -> None:
        """Change a sum of this rank, if its schedule says so: the local one, or the reduced one."""
        since, times, where = self.schedule.wrong_sums.get(self.rank, (0, 0, ""))
        if where == which and self.world.hooks.step >= since and self.flips < times:
            self.flips += 1
            getattr(self.sums.buckets[0], which)[0] += FLIPPED / self.sums._units[0]

    def note_result(self, slot: int, value: int, counts: bool) -> None:
        """Note the result of a microbatch as `CheckedMicrobatch` does."""
        verification = self.transaction.verification
        if not counts:
            verification.note(slot, value)
            if verification.wants_operations:
                verification.note_operations([])
        elif verification.is_checked(slot):
            verification.note_owned(slot, value)

    def commit(self, number: int) -> None:
        """Commit as `Step` and the trainer do; the rank may die at every place on the way."""
        totals, incidents = self.transaction.totals, self.transaction.incidents
        self.come_to("update")
        result = self.result()
        self.last_update = {"step": number, "exponents": self.sums.exponents.current.tolist()}
        if self.schedule.seed % 3:  # otherwise the update is sent with the next attempt
            self.world.tell({"do": UPDATE, "committed": self.last_update})
        self.diary.commits[number] = (
            tuple(totals.samples),
            result,
            totals.weight,
            tuple(self.sums.exponents.current.tolist()),
        )
        if len(self.transaction.maxima.agreed):  # not where a broken transaction has committed without a vote
            self.transaction.maxima.commit()
        self.diary.flaws[number] = self.flaw
        self.diary.verified[number] = self.verified_slots()
        self.diary.incidents.append((self.transaction.layout, list(incidents)))
        self.apply(range(ENTRIES), result)
        self.come_to("after-update")
        self.number = number
        self.transaction.finish()
        self.world.board.accomplish(self.rank)
        line = {"step": number, "epoch": self.world.epoch, "samples": totals.samples, "seconds": 0.0}
        lost = [
            {
                "step": i.step,
                "epoch": i.epoch,
                "dead_ranks": list(i.dead_ranks),
                "left_ranks": list(i.left_ranks),
                "joined_ranks": list(i.joined_ranks),
            }
            for i in incidents
        ]
        self.journal.commit(line, lost)  # type: ignore[arg-type]
        self.come_to("advance")

    def verified_slots(self) -> tuple[int, ...]:
        """Slots of this commit for which two replicas computed equal results."""
        verification, pairs = self.transaction.verification, self.transaction.totals.checked()
        verification.commit(pairs)
        both = zip(verification.checks, pairs, strict=False) if verification.is_on else ()
        return tuple(
            check.slot for check, (a, b) in both if a is not None and a == b and check.owner != check.shadow
        )

    def close(self) -> None:
        self.world.hooks("close")
        self.journal.finish()

    def come_to(self, place: str) -> None:
        self.world.hooks(place)
        self.fabric.wait(place)

    def lost(self, ranks: tuple[int, ...], seconds: float) -> None:
        """Note in the journal that ranks died after the last step."""
        line = {
            "step": self.number,
            "epoch": self.world.epoch,
            "dead_ranks": list(ranks),
            "left_ranks": [],
            "joined_ranks": [],
        }
        self.journal.incidents.kept.append(line)  # type: ignore[arg-type]

    def note(self, census: Census) -> Census:
        zombies = set(self.simulation.kept.declared) if self.simulation.kept else set()
        outside = set(self.simulation.agreements.participants) - self.simulation.gone - zombies
        outside -= {*census.members, *self.simulation.stopped}
        assert not outside or self.joining, f"{outside} are left out, and may still act"
        if census.epoch and not all(map(Arrival.is_in, census.records.values())):
            self.diary.censuses[census.epoch] = (census.members, census.lost, census.joined)
        return census


def has_drifted(schedule: Schedule, replica: int, number: int) -> bool:
    """Whether a bit has flipped in some rank of this replica when this step begins."""
    return any(
        schedule.grid.replica(rank) == replica and since <= number for rank, since in schedule.drifts.items()
    )
