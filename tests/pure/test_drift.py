"""Which state is right where replicas differ, and the entry in which they differ: all members find the same from one
census."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from lone_world import World

import recover
from recover.job.grid import Grid
from recover.policy import Holding, Role, SlotSet
from recover.step.difference import PARTS, Difference, Digest, Inquiry, StateKind
from recover.step.drift import DriftVerdict, judge
from recover.step.record import Record
from recover.step.seniority import STEPS, Seniority

HOLDING = Holding(0, Role.MAJOR, SlotSet(), True)


def record(fingerprint: int, since: int = 0, counts: bool = True, answer: bytes = b"") -> Record:
    return Record(
        5, False, True, True, False, False, 0, fingerprint, since, counts, 0, False, HOLDING, answer
    )


def verdict(*replicas: tuple[int, int, bool]) -> DriftVerdict:
    """The verdict on replicas, each given as its fingerprint, the step in which it joined, and whether it counts."""
    return judge(Grid(3, 1), {rank: record(*one) for rank, one in enumerate(replicas)})


OLD, JUNIOR, PROVEN = (0, True), (7, False), (7, True)


@pytest.mark.guarantee(
    "Joining",
    "A joined replica has no say in which state is right before a save or 100 steps have found it equal.",
)
@pytest.mark.parametrize(
    ("replicas", "evicted"),
    [
        ([(1, *OLD), (1, *OLD), (2, *OLD)], {2}),
        ([(1, *OLD), (2, *JUNIOR), (2, *JUNIOR)], {1, 2}),  # the original replica stays
        ([(1, *OLD), (2, *JUNIOR), (3, *JUNIOR), (1, *JUNIOR)], {1, 2}),
        ([(2, *OLD), (1, *OLD), (1, *OLD), (2, *JUNIOR), (2, *JUNIOR)], {0, 3, 4}),
        ([(2, *OLD), (1, *OLD), (1, *PROVEN)], {0}),  # one original replica is in the majority
        ([(1, *JUNIOR), (1, *JUNIOR), (2, *JUNIOR)], {2}),  # no original replica is left
    ],
)
def test_majority_of_counting_replicas_decides(
    replicas: list[tuple[int, int, bool]], evicted: set[int]
) -> None:
    assert verdict(*replicas) == DriftVerdict(frozenset(evicted), compared=verdict(*replicas).compared)


@pytest.mark.parametrize(
    ("replicas", "states"),
    [
        ([(1, *OLD), (2, *OLD)], ((0,), (1,))),
        ([(1, *OLD), (2, *OLD), (2, *JUNIOR)], ((0,), (1, 2))),  # a junior does not decide a tie
        (
            [(2, *PROVEN), (1, *OLD), (2, *PROVEN)],
            ((1,), (0, 2)),
        ),  # nor do all joined replicas together
    ],
)
def test_run_stops_where_old_and_new_replicas_differ_without_a_majority(
    replicas: list[tuple[int, int, bool]], states: tuple[tuple[int, ...], ...]
) -> None:
    found = verdict(*replicas)
    assert found.states == states
    assert found.why
    assert not found.evicted


@pytest.mark.guarantee(
    "Joining",
    "A joined replica has no say in which state is right before a save or 100 steps have found it equal.",
)
@given(
    some.lists(some.integers(1, 3), min_size=1, max_size=5),
    some.lists(some.tuples(some.integers(1, 3), some.booleans(), some.integers(1, 9)), max_size=5),
)
def test_joined_replicas_never_decide_and_survivors_hold_one_state(
    seniors: list[int], joined: list[tuple[int, bool, int]]
) -> None:
    """Any number of original and of joined replicas, confirmed or not, with any states."""
    replicas = [(state, 0, True) for state in seniors] + [(state, since, ok) for state, ok, since in joined]
    found = verdict(*replicas)
    counting = Counter(state for state, _, counts in replicas if counts)
    left = {state for number, (state, *_) in enumerate(replicas) if number not in found.evicted}
    if found.states:
        assert sorted(number for group in found.states for number in group) == list(range(len(replicas)))
        assert all(len({replicas[number][0] for number in group}) == 1 for group in found.states)
        state, votes = counting.most_common(1)[0]
        assert 2 * votes <= counting.total() or state not in seniors
        return
    (right,) = left
    assert 2 * counting[right] > counting.total()
    assert right in seniors, "not all who were there from the beginning are evicted by those who came"
    # The verdict is the same without the joined replicas that do not count, whatever state they hold.
    assert verdict(*[one for one in replicas if one[2]]).states == ()


@pytest.mark.guarantee(
    "Joining",
    "A joined replica has no say in which state is right before a save or 100 steps have found it equal.",
)
def test_joined_replica_counts_after_a_full_comparison_or_100_steps() -> None:
    seniority = Seniority()
    assert seniority.counts(1)
    for asked, counts in ((False, False), (True, True)):
        seniority.join(10)
        seniority.compares = True  # this comparison was asked for before the replica joined
        seniority.found_equal(10)
        assert not seniority.counts(11)
        seniority.compares = asked
        seniority.found_equal(11)
        assert seniority.counts(12) is counts
        assert not seniority.compares
    seniority.join(10)
    assert next(step for step in range(10, 300) if seniority.counts(step)) == 10 + STEPS


def test_drift_record_survives_serialization() -> None:
    told = record(2**64 - 1, since=12, counts=False, answer=b"[1]")
    assert Record.from_bytes(told.to_bytes()) == told


def inquire(members: Sequence[Sequence[Digest]], against: Sequence[int] = ()) -> tuple[list[Difference], int]:
    """The findings of the first member, and the number of rounds; all others find the same."""
    inquiries = [Inquiry(lambda entries=entries: entries) for entries in members]  # type: ignore[misc]
    rounds = 0
    while True:
        answers = [inquiry.answer() for inquiry in inquiries]
        assert all(len(answer) < 4096 for answer in answers)
        compared = {number: (answers[number], answers[0]) for number in range(1, len(members))}
        goes_on = {inquiry.goes_on(compared) for inquiry in inquiries}
        assert len(goes_on) == 1
        if not goes_on.pop():
            break
        rounds += 1
    assert all(inquiry.found == inquiries[0].found for inquiry in inquiries)
    return [inquiries[0].found[number] for number in range(1, len(members))], rounds


def entries(count: int, changed: int | None = None, kind: StateKind = StateKind.PARAMETER) -> list[Digest]:
    made = [Digest(kind, f"blocks.{number}.w1", "00", True) for number in range(count)]
    if changed is not None:
        made[changed] = Digest(kind, made[changed].name, "01", True)
    return made


@given(some.integers(1, 3 * PARTS * PARTS), some.data())
def test_first_differing_entry_is_found_in_a_few_rounds(count: int, data: some.DataObject) -> None:
    first = data.draw(some.integers(0, count - 1))
    (found,), rounds = inquire([entries(count), entries(count, first)])
    assert found == Difference(StateKind.PARAMETER, f"blocks.{first}.w1")
    assert rounds <= 5


def test_drift_reason_is_specific_to_each_replica() -> None:
    others = [entries(500, 7 * number) for number in range(1, 12)]
    found, rounds = inquire([entries(500), *others, entries(500)])
    assert [one.name for one in found[:-1]] == [f"blocks.{7 * number}.w1" for number in range(1, 12)]
    assert found[-1].reason() == "its state differs from the majority", "it has found nothing"
    assert rounds <= 12


def test_drift_cause_is_named_before_its_effects() -> None:
    def state(rate: str, moment: str, trained: str = "True") -> list[Digest]:
        return [
            Digest(StateKind.PARAMETER, "w", moment, True),
            Digest(StateKind.OPTIMIZER, "exp_avg of w", moment, True),
            Digest(StateKind.TRAINED, "w", trained),
            Digest(StateKind.SETTING, "learning rate", rate),
        ]

    told = [
        found.reason()
        for found in inquire(
            [
                state("0.0024", "a"),
                state("0.0021", "b"),
                state("0.0024", "b"),
                state("0.0024", "b", "False"),
            ]
        )[0]
    ]
    assert told == [
        "learning rate 0.0021, the others have 0.0024",
        "its parameters differ from the majority, first in w",
        "it trains other parameters than the majority, first in w",
    ]


def test_drift_inquiry_skips_replicas_that_die_during_it() -> None:
    inquiry = Inquiry(lambda: entries(3))
    assert inquiry.goes_on({1: (b"", b""), 2: (b"", b"")})
    mine, theirs = inquiry.answer(), Inquiry(lambda: entries(3, 1))
    theirs.goes_on({1: (b"", b"")})
    assert inquiry.goes_on({2: (theirs.answer(), mine)})
    assert not inquiry.goes_on({})


def _state_of(change: str) -> list[Digest]:
    """The digests of a step's state after this change."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0024)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    extra = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    step = recover.Step(
        World(),  # type: ignore[arg-type]
        model,
        optimizer,
        global_batch=1,
        scheduler=scheduler,
        extra={"other": extra},
    )
    for batch in step.microbatches([torch.randn(4, 3)] * 2):
        step.backward(model(batch).sum())
    match change:
        case "learning rate":
            optimizer.param_groups[0]["lr"] = 0.0021
        case "parameters":
            model[0].bias.data[1] += 1
        case "order":
            model[0].weight.data = model[0].weight.data.flip(0)
        case "buffers":
            model[1].running_var[2] += 1  # type: ignore[index, operator]
        case "optimizer":
            optimizer.state[model[0].bias]["exp_avg"][0] += 1
        case "trained":
            model[0].bias.requires_grad_(False)
        case "scheduler":
            scheduler.last_epoch = 12
        case "extra":
            extra.step_size = 8
    return step._engine.compared.digests()


@pytest.mark.guarantee(
    "State and samples",
    "The evicted replica, its peers, `recover why`, the page and `incidents.jsonl` name the entry that "
    "differs.",
)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("learning rate", "learning rate 0.0021, the others have 0.0024"),
        ("parameters", "its parameters differ from the majority, first in 0.bias"),
        ("order", "its parameters differ from the majority, first in 0.weight"),
        ("buffers", "its buffers differ from the majority, first in 1.running_var"),
        ("optimizer", "its optimizer state differs from the majority, first in exp_avg of 0.bias"),
        ("trained", "it trains other parameters than the majority, first in 0.bias"),
        ("scheduler", "its scheduler differs from the majority: last_epoch 12, the others have 1"),
        ("extra", "its extra state differs from the majority: other.step_size 8, the others have 7"),
    ],
)
def test_drift_reason_distinguishes_each_kind_of_difference(change: str, reason: str) -> None:
    (found,), _ = inquire([_state_of(""), _state_of(change)])
    assert found.reason() == reason


def test_drift_answers_are_json_and_small_for_a_large_model() -> None:
    inquiry = Inquiry(lambda: entries(200_000))
    inquiry.goes_on({1: (b"", b"")})
    assert json.loads(inquiry.answer())[0]["parameter"][0] == 200_000
    assert len(inquiry.answer()) < 1024


class Nested(torch.optim.SGD):
    """An optimizer that keeps its state in lists and dicts, under keys of two types."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                held = [torch.zeros(3), ({"a": torch.zeros(3), "count": 1},)]
                self.state[parameter].update({0: held, "m": torch.ones(2)})


@pytest.mark.guarantee(
    "State and samples",
    "Every vote compares parameters, running buffers and settings; a save also compares optimizer state, "
    "schedulers and `extra=`.",
)
@pytest.mark.parametrize(
    "change", ["nested", "value", "learning rate", "scheduler", "extra", "none", "no parameter's"]
)
def test_full_fingerprint_covers_all_state(change: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = Nested(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    extra = {"mean": torch.nn.Linear(2, 2)}
    step = recover.Step(World(), model, optimizer, global_batch=1, scheduler=scheduler, extra=extra)  # type: ignore[arg-type]
    for batch in step.microbatches([torch.ones(1, 2)] * 2):
        step.backward(model(batch).sum())
    before = [step._engine.compared.fingerprint(2, full).value for full in (False, True)]
    state: Any = optimizer.state[model.weight][0]
    match change:
        case "nested":
            state[1][0]["a"][2] = 1
        case "value":
            state[1][0]["count"] = 2
        case "learning rate":
            optimizer.param_groups[0]["lr"] = 0.2
        case "scheduler":
            scheduler.last_epoch = 7
        case "extra":
            extra["mean"].weight.data[1, 1] += 1
        case "no parameter's":
            optimizer.state["seen"] = {"all": torch.ones(2)}  # type: ignore[index]
    after = [step._engine.compared.fingerprint(2, full).value for full in (False, True)]
    in_each_step = change == "learning rate"
    assert [one != other for one, other in zip(before, after, strict=True)] == [
        in_each_step,
        change != "none",
    ]
