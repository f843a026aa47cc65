"""Verified gradients: some slots of a step are computed by two replicas, and their gradients must
have the same bits.

`plan_checks` selects the slots, and `judge` decides which replica has erred. Both are pure
functions; `judge` depends on the census alone, so all members decide alike. This module does not
import torch: the simulated world runs it, too.

A mismatch is decided in rounds; each round is a repair in whose census the members give evidence:

1. Both replicas of the pair compute the slot again. A replica that does not reproduce its own
   result has erred.
2. Both reproduce their own result, or one of the pair has died: a third replica decides.
3. Three results: the members that computed the slot look for operations that are not
   deterministic; no replica is evicted, and verification is switched off.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from recover.gradients.deferred import DeviceValue, now
from recover.job.grid import Grid
from recover.policy import Layout
from recover.runs.records.kinds import WRONG_GRADIENT

START_SLOT, START_RUNS = 0, 3  # before the first step, all replicas compute this slot this often
OPERATION_RUNS = 2  # runs of a slot that are compared operation by operation
NAMED = 8  # operations in a message

Value = int | DeviceValue[int]
Result = tuple[int, ...]  # of a replica: the fingerprint of each of its ranks


class CheckKind(StrEnum):
    """Why a slot is computed without entering the sums."""

    START = "start"  # to find kernels that are not deterministic
    SHADOW = "shadow"  # the slot belongs to another replica
    AGAIN = "again"  # after a mismatch
    OPERATIONS = "operations"  # to name operations that are not deterministic


@dataclass(frozen=True)
class Check:
    """A slot that two replicas compute; with one replica, the same one twice."""

    slot: int
    owner: int
    shadow: int


def turn_of(number: int, owners: int, busy: int) -> tuple[int, int]:
    """Check `number` of a run: the place of its owner among those that own slots, and the place of
    its shadow among the other busy replicas; each replica in turn, by each other one in turn."""
    turn, place = divmod(number, owners)
    return place, (turn + place) % max(1, busy - 1)


def plan_checks(
    layout: Layout, count: int, seed: int, step: int, resting: Collection[int] = ()
) -> tuple[Check, ...]:
    """The checks of a step: each replica is checked in turn, a slot of it that follows from the
    seed, by a shadow that rotates. With W replicas, each is checked every W / count steps."""
    busy = [share for share in layout.shares if share.replica not in resting]
    owners = [share for share in busy if share.run]
    checks: list[Check] = []
    for number in range(step * count, (step + 1) * count):
        taken = {check.slot for check in checks}
        place, other_place = turn_of(number, len(owners), len(busy))
        # With many checks, a replica may have no slot left: then the next replica that has one is checked.
        in_turn = (share for share in owners[place:] + owners[:place] if set(share.run) - taken)
        if (share := next(in_turn, None)) is None:
            break
        others = [other.replica for other in busy if other.replica != share.replica]
        shadow = others[other_place] if others else share.replica
        free = [slot for slot in share.run if slot not in taken]
        drawn = hashlib.blake2b(f"verify/{seed}/{number}".encode(), digest_size=8).digest()
        checks.append(Check(free[int.from_bytes(drawn) % len(free)], share.replica, shadow))
    return tuple(checks)


@dataclass
class Evidence:
    """Results of one rank for the verified slots of a step, sent in its census record."""

    own: dict[int, list[int]] = field(default_factory=dict)  # slot: its own results, the first one first
    # slot: the pair, and their first results as the totals have shown them, for replicas that die
    seen: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    start: list[int] = field(default_factory=list)
    operations: list[str] | None = None  # names of those that are not deterministic; None: not looked for
    host: str = ""

    def to_bytes(self) -> bytes:
        said = {
            "own": self.own,
            "seen": self.seen,
            "start": self.start,
            "operations": self.operations,
            "host": self.host,
        }
        return json.dumps(said, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Evidence:
        said = json.loads(data)
        return cls(
            {int(slot): values for slot, values in said["own"].items()},
            {int(slot): tuple(values) for slot, values in said["seen"].items()},
            said["start"],
            said["operations"],
            said["host"],
        )


def host_of(evidence: bytes) -> str:
    """The host of the rank that has sent this evidence; "" if it has sent none."""
    return Evidence.from_bytes(evidence).host if evidence else ""


@dataclass(frozen=True)
class GradientVerdict:
    """The verdict on the evidence of a census."""

    evicted: Mapping[int, str] = field(default_factory=dict)  # replicas that erred, and how it was found
    # Slots to compute again, and by which replicas.
    recompute: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    kind: CheckKind = CheckKind.AGAIN
    settled: frozenset[int] = frozenset()  # slots that are decided
    off: str = ""  # why verification is switched off
    error: str = ""  # why no replica can go on


class _Census:
    """The evidence of all members, replica by replica."""

    def __init__(self, grid: Grid, evidence: Mapping[int, Evidence]) -> None:
        self._grid, self._evidence = grid, evidence
        self.ranks: dict[int, list[int]] = {}
        for rank in sorted(evidence):
            self.ranks.setdefault(grid.replica(rank), []).append(rank)

    def of(self, replica: int) -> list[Evidence]:
        return [self._evidence[rank] for rank in self.ranks[replica]]

    def results(self, replica: int, slot: int) -> list[Result]:
        """The results of a replica for a slot, in their order; only those that all ranks have."""
        own = [evidence.own.get(slot, []) for evidence in self.of(replica)]
        return list(zip(*own, strict=False))

    def start(self, replica: int) -> list[Result]:
        return list(zip(*(evidence.start for evidence in self.of(replica)), strict=False))

    def slots(self) -> list[int]:
        everything = (slot for e in self._evidence.values() for slot in (*e.own, *e.seen))
        return sorted(set(everything))

    def seen(self, slot: int) -> dict[int, Result]:
        """First results of a slot as the totals have shown them, of shards that have seen them."""
        shards: dict[int, tuple[int, int, int, int]] = {}
        for rank, evidence in self._evidence.items():
            if slot in evidence.seen:
                shards.setdefault(self._grid.shard(rank), evidence.seen[slot])
        if len(shards) < self._grid.replica_size:
            return {}
        pairs = {values[:2] for values in shards.values()}
        if len(pairs) > 1:
            return {}
        ((owner, shadow),) = pairs
        in_order = [shards[shard] for shard in sorted(shards)]
        return {owner: tuple(v[2] for v in in_order), shadow: tuple(v[3] for v in in_order)}

    def operations(self, replicas: Collection[int]) -> list[str] | None:
        """Names found by these replicas; None while one of them has not looked."""
        lists = [evidence.operations for replica in replicas for evidence in self.of(replica)]
        if any(names is None for names in lists):
            return None
        return sorted({name for names in lists for name in names or ()})

    def differing(self, replica: int, one: Result, other: Result) -> str:
        """The replica's host, and in a replica of several ranks those whose results differ."""
        ranks = self.ranks[replica]
        several = [rank for rank, a, b in zip(ranks, one, other, strict=False) if a != b]
        hosts = sorted({evidence.host for evidence in self.of(replica) if evidence.host})
        where = f" on {', '.join(hosts)}" if hosts else ""
        which = f"rank{'s' if len(several) > 1 else ''} {', '.join(map(str, several))}"
        return f"{which}{where}"


def judge(
    grid: Grid, evidence: Mapping[int, Evidence], settled: Collection[int] = (), resting: Collection[int] = ()
) -> GradientVerdict:
    """The verdict on the first undecided slot. `settled`: slots that were decided before;
    `resting`: replicas that compute nothing in this step."""
    census = _Census(grid, evidence)
    if (verdict := _judge_start(census)) is not None:
        return verdict
    waiting: dict[int, tuple[int, ...]] = {}
    for slot in census.slots():
        if slot in settled:
            continue
        verdict = _judge_slot(census, slot, resting)
        if verdict is None:
            continue
        if verdict.kind is not CheckKind.AGAIN or not verdict.recompute:
            return verdict
        waiting |= verdict.recompute
    return GradientVerdict(recompute=waiting)


def _judge_slot(census: _Census, slot: int, resting: Collection[int]) -> GradientVerdict | None:
    """The verdict on one slot; None if all of its results are equal."""
    results = {replica: found for replica in census.ranks if (found := census.results(replica, slot))}
    # For a living replica its own evidence counts, not the totals: a sum that was aborted may look finished.
    gone = {replica: value for replica, value in census.seen(slot).items() if replica not in census.ranks}
    everything = {*gone.values(), *(value for values in results.values() for value in values)}
    if len(everything) < 2 or not results:
        return None
    done = frozenset([slot])
    if unsteady := {replica: values for replica, values in results.items() if len(set(values)) > 1}:
        reasons = {
            replica: f"{WRONG_GRADIENT} {slot} is wrong: it did not reproduce its own result "
            f"({census.differing(replica, values[0], next(v for v in values if v != values[0]))})"
            for replica, values in unsteady.items()
        }
        return _evict(census, reasons, done)
    parties = sorted(results)
    firsts = {replica: values[0] for replica, values in results.items()} | gone
    if len(firsts) < 3:
        if once := tuple(replica for replica in parties if len(results[replica]) < 2):
            return GradientVerdict(recompute={slot: once})
        others = [replica for replica in census.ranks if replica not in firsts and replica not in resting]
        if others:
            return GradientVerdict(recompute={slot: (others[0],)})
        if len(parties) < 2:
            return GradientVerdict(settled=done)  # alone, and it has reproduced its own result
        return GradientVerdict(error=_two_results(census, slot, parties, firsts), settled=done)
    right, times = Counter(firsts.values()).most_common(1)[0]
    if times > 1:
        wrong = [replica for replica in parties if firsts[replica] != right]
        reasons = {
            replica: f"{WRONG_GRADIENT} {slot} is wrong: two other replicas have another result "
            f"({census.differing(replica, firsts[replica], right)})"
            for replica in wrong
        }
        return _evict(census, reasons, done) if reasons else GradientVerdict(settled=done)
    names = census.operations(parties)
    if names is None:
        return GradientVerdict(recompute={slot: tuple(parties)}, kind=CheckKind.OPERATIONS)
    return GradientVerdict(
        settled=done,
        off=f"slot {slot} has three results, of {_replicas(firsts)}, and each replica reproduces its own; "
        f"operations that are not deterministic: {_named(names)}",
    )


def _judge_start(census: _Census) -> GradientVerdict | None:
    """The verdict on the check before the first step; None if it has passed, or has not taken
    place."""
    starts = {replica: census.start(replica) for replica in census.ranks}
    starts = {replica: values for replica, values in starts.items() if len(values) == START_RUNS}
    if len({value for values in starts.values() for value in values}) < 2:
        return None
    unsteady = [replica for replica, values in starts.items() if len(set(values)) > 1]
    if unsteady:
        names = census.operations(unsteady)
        if names is None:
            return GradientVerdict(recompute={START_SLOT: tuple(unsteady)}, kind=CheckKind.OPERATIONS)
        if names or len(unsteady) == len(census.ranks):
            return GradientVerdict(
                error=f"verify needs kernels that are deterministic: {_replicas(unsteady)} computed slot {START_SLOT} "
                f"{START_RUNS} times with different gradients. Operations that are not deterministic: {_named(names)}. "
                "Replace them, call torch.use_deterministic_algorithms(True), or set verify=0"
            )
        reasons = {
            replica: f"{WRONG_GRADIENT} {START_SLOT} is wrong: it did not reproduce its own result before the "
            f"first step ({_unequal(census, replica, starts[replica])})"
            for replica in unsteady
        }
        return _evict(census, reasons, frozenset())
    right, times = Counter(values[0] for values in starts.values()).most_common(1)[0]
    wrong = {replica: values[0] for replica, values in starts.items() if values[0] != right}
    if 2 * times <= len(starts):
        return GradientVerdict(
            error=f"verify needs the same bits on all replicas: {_replicas(starts)} compute slot {START_SLOT} with "
            "different gradients, each time the same ones, and there is no majority. Use equal devices, versions of "
            "torch and numbers of threads, or set verify=0"
        )
    return GradientVerdict(
        evicted={
            replica: f"{WRONG_GRADIENT} {START_SLOT} before the first step differs from the majority "
            f"({census.differing(replica, value, right)})"
            for replica, value in wrong.items()
        }
    )


def _unequal(census: _Census, replica: int, values: Sequence[Result]) -> str:
    return census.differing(replica, values[0], next(value for value in values if value != values[0]))


def _evict(census: _Census, reasons: dict[int, str], settled: frozenset[int]) -> GradientVerdict:
    if len(reasons) < len(census.ranks):
        return GradientVerdict(evicted=reasons, settled=settled)
    told = "; ".join(f"replica {replica}: {why}" for replica, why in reasons.items())
    return GradientVerdict(
        settled=settled,
        error=f"no replica is left that computes right gradients ({told}); nothing of this step was committed. Check "
        "the devices, and resume from the last checkpoint on others",
    )


def _two_results(census: _Census, slot: int, parties: Sequence[int], firsts: Mapping[int, Result]) -> str:
    one, other = parties
    where = "; ".join(census.differing(replica, firsts[one], firsts[other]) for replica in parties)
    return (
        f"replicas {one} and {other} have different gradients of slot {slot} ({where}), "
        "each reproduces its own, and there is no third replica to decide; nothing of this step was committed. Check "
        "both devices, and resume from the last checkpoint with three replicas or more"
    )


def _replicas(replicas: Collection[int]) -> str:
    return f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, sorted(replicas)))}"


def _named(names: Sequence[str]) -> str:
    if not names:
        return "none was found (torch.use_deterministic_algorithms(True) may name them)"
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


class Verification:
    """The checks of one rank: those of the step in progress, and what earlier ones have shown.

    count:     slots that are verified in each step (`verify=K`); 0: none
    seed:      slots follow from it, and from the step
    at_start:  whether the kernels are checked before the first step; not on a joining replica
    host:      where this rank runs, for messages
    """

    def __init__(self, count: int = 0, seed: int = 0, at_start: bool = True, host: str = "") -> None:
        self._seed, self._host = seed, host
        self.planned = count  # checks in a row of the totals
        self.off = "" if count else "verify=0"  # why nothing is verified
        self._warning = ""
        # The last step in which a gradient of each replica was found right.
        self.passed: dict[int, int] = {}
        self._starts = bool(count) and at_start
        self.begin(0, None, -1)

    def begin(self, step: int, layout: Layout | None, replica: int, resting: Collection[int] = ()) -> None:
        """Begin a step, or begin it over, with this layout; None: this replica brings nothing."""
        self._step, self._replica, self._resting = step, replica, resting
        self.checks: tuple[Check, ...] = ()
        if layout is not None and step > 0 and self.is_on:
            self.checks = plan_checks(layout, self.planned, self._seed, step, resting)
        self._own: dict[int, list[Value]] = {}
        self._seen: dict[int, tuple[int, int, int, int]] = {}
        self._start: list[Value] = []
        self._operations: list[str] | None = None
        self._settled: set[int] = set()
        self._kind = CheckKind.SHADOW
        self._verdict = GradientVerdict()

    @property
    def is_on(self) -> bool:
        return not self.off

    @property
    def is_pending(self) -> bool:
        """Whether the members must compute slots again before they can decide."""
        return bool(self._verdict.recompute)

    @property
    def wants_operations(self) -> bool:
        """Whether the slot that runs is compared operation by operation."""
        return self._kind is CheckKind.OPERATIONS

    def is_checked(self, slot: int) -> bool:
        """Whether another replica computes this slot of this replica, too."""
        return any(check.slot == slot and check.owner == self._replica for check in self.checks)

    def slots_to_check(self) -> Iterator[int]:
        """Slots that this replica computes without adding them to its sums, before its share."""
        if self._starts and self._step > 0 and not self._start:
            self._kind = CheckKind.START
            yield from [START_SLOT] * START_RUNS
        self._kind = CheckKind.SHADOW
        yield from (check.slot for check in self.checks if check.shadow == self._replica)

    def slots_to_repeat(self) -> Iterator[int]:
        """Slots that this replica computes again before the members decide."""
        self._kind, runs = self._verdict.kind, 1
        if self._kind is CheckKind.OPERATIONS:
            self._operations, runs = [], OPERATION_RUNS
        for slot, replicas in sorted(self._verdict.recompute.items()):
            if self._replica in replicas:
                yield from [slot] * runs

    def note(self, slot: int, value: Value) -> None:
        """Record the fingerprint of the gradient of a slot that was computed."""
        if self._kind is CheckKind.START:
            self._start.append(value)
        elif self._kind is not CheckKind.OPERATIONS:
            self._own.setdefault(slot, []).append(value)

    def note_owned(self, slot: int, value: Value) -> None:
        """Record the fingerprint of a slot of this replica that is in its local sums. It goes before the
        result that the same replica has computed as shadow: the gradient in the sums is compared with
        the gradient of the shadow slot."""
        self._own.setdefault(slot, []).insert(0, value)

    def note_operations(self, names: Sequence[str]) -> None:
        """Operations that were not deterministic on this rank."""
        self._operations = sorted({*(self._operations or ()), *names})

    @property
    def unread(self) -> list[Value]:
        """Values that may still be on a device."""
        return [*self._start, *(value for values in self._own.values() for value in values)]

    def said(self, held: Collection[int]) -> tuple[list[tuple[int, int | None, int | None]], int | None]:
        """This rank's part of the totals: for each check its number and the results as its owner and
        as its shadow, and a digest of the check before the first step, if it ran in this one.
        `held`: slots in the local sums; the result of a slot that has left them does not count."""
        said: list[tuple[int, int | None, int | None]] = []
        for number, check in enumerate(self.checks):
            values = [now(value) for value in self._own.get(check.slot, ())]
            mine = check.owner == self._replica and check.slot in held
            alone = check.owner == check.shadow
            owned = values[0] if mine and values else None
            shadow = values[alone] if check.shadow == self._replica and len(values) > alone else None
            said.append((number, owned, shadow))
        if not self._start:
            return said, None
        starts = [now(value) for value in self._start]
        # Three equal results are one statement; different ones must not look like those of another replica.
        digest = hashlib.blake2b(
            repr((starts, len(set(starts)) > 1 and self._replica)).encode(), digest_size=8
        )
        return said, int.from_bytes(digest.digest())

    def compare(self, pairs: Sequence[tuple[int | None, int | None]], starts_equal: bool) -> bool:
        """Whether the totals show no mismatch. `pairs`: for each check the results of owner and
        shadow; None: not computed, or lost."""
        if not self.is_on:
            return True
        equal = starts_equal
        for check, (owned, shadow) in zip(self.checks, pairs, strict=False):
            if owned is not None and shadow is not None:
                self._seen[check.slot] = check.owner, check.shadow, owned, shadow
                equal &= owned == shadow or check.slot in self._settled
        return equal

    def evidence(self) -> bytes:
        """This rank's evidence, for its census record."""
        if not self.is_on:
            return b""
        own = {
            slot: [now(v) for v in values] for slot, values in self._own.items() if slot not in self._settled
        }
        seen = {slot: found for slot, found in self._seen.items() if slot not in self._settled}
        start = [now(value) for value in self._start]
        return Evidence(own, seen, start, self._operations, self._host).to_bytes()

    def decide(self, grid: Grid, records: Mapping[int, bytes]) -> GradientVerdict:
        """The verdict of all members; `records`: the evidence of each of them, by rank."""
        given = {rank: Evidence.from_bytes(data) for rank, data in records.items() if data}
        if len(given) < len(records) or not self.is_on:
            self._verdict = GradientVerdict()
            return self._verdict
        verdict = self._verdict = judge(grid, given, self._settled, self._resting)
        self._settled |= verdict.settled
        if verdict.off:
            self.off, self._warning = verdict.off, f"verify is switched off: {verdict.off}"
        return verdict

    def take_warning(self) -> str:
        """A warning for all logs; returned once."""
        warning, self._warning = self._warning, ""
        return warning

    def since_passed(self, replica: int) -> str:
        """How many steps were committed since a gradient of this replica was found right."""
        last = self.passed.get(replica)
        steps = self._step - 1 - (last or 0)
        told = f"its last passed check was in step {last}" if last else "it had not passed a check before"
        return f"{told}, {steps} step{'s' if steps != 1 else ''} {'were' if steps != 1 else 'was'} committed since"

    def commit(self, pairs: Sequence[tuple[int | None, int | None]]) -> tuple[int, int]:
        """The step is committed. Returns the numbers of verified and unverified slots."""
        if not self.is_on:
            return 0, 0
        self._starts = False
        both = [owned is not None and owned == shadow for owned, shadow in pairs]
        for check, verified in zip(self.checks, both, strict=False):
            if verified:
                self.passed[check.owner] = self.passed[check.shadow] = self._step
        return sum(both), len(both) - sum(both)

    def state_dict(self) -> dict[str, Any]:
        """The state that a joining replica receives."""
        return {"off": self.off, "passed": dict(self.passed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.off, self.passed, self._starts = state["off"], dict(state["passed"]), False
