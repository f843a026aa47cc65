"""Collective calls of the public API: every replica makes the same ones, in the same order.

A rank announces each call on the board of its host before it sends anything: which call, and its
position in the order of calls. Two ranks in different calls at the same position prove a mistake in
the script, however fast either of them is; a rank that has not reached that position proves
nothing. A step sends data at once; every other call begins with an agreement, so the data of two
different calls never mix. The census of a repair has every rank's call, so that all replicas raise
the same error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import IntEnum

from recover.job.grid import Grid

_CODE_BITS = 8
_SEQUENCE_BITS = 16
LEFT = -1  # in place of a step in a note: the rank has ended because not all replicas made its call


class Call(IntEnum):
    """Kinds of calls, as numbers for the board and for agreements; 0 is no call."""

    STEP = 1
    END = 2
    AGREE = 3
    BUILD = 4
    SAVE = 5
    RESUME = 6
    CONFIRM = 7
    TRAIN_START = 8
    TRAIN_END = 9

    @property
    def word(self) -> int:
        """The word of a rank in the agreement of this call.

        The AND of two different words is neither of them.
        """
        ones = (1 << _CODE_BITS) - 1
        return self << _CODE_BITS | (ones ^ self)

    def at(self, step: int) -> int:
        """The call as one number, with its step, or with the last committed one."""
        return step << _CODE_BITS | self


_NAMES = {
    Call.AGREE: "world.agree",
    Call.BUILD: "recover.Step(...)",
    Call.SAVE: "recover.save",
    Call.RESUME: "recover.resume",
    Call.CONFIRM: "step.confirm",
    Call.TRAIN_START: "the start of `recover train`",
    Call.TRAIN_END: "the end of `recover train`",
}
# The remedy is on a line of its own: the verdict on the job quotes the first line only.
_REMEDY = (
    "Call it on every rank after the same step, not under `if rank == 0` (recover.save writes once by itself). Decide "
    "from values that are the same on all replicas, such as step.index and step.loss; what the script keeps for such a "
    "decision, such as the best loss so far, belongs in extra= of recover.Step, so that a joining replica gets it."
)


class CollectiveCallError(RuntimeError):
    """Replicas made different collective calls.

    All of them raise it; the state is that of the last committed step.
    """


def position(agreements: int, sequence: int) -> int:
    """A position in the order of calls: the number of agreements, then the number of calls that
    have ended without an agreement since."""
    return agreements << _SEQUENCE_BITS | sequence


def agreements_at(position: int) -> int:
    return position >> _SEQUENCE_BITS


def conflict(calls: Collection[int]) -> bool:
    """Whether calls at the same position contradict each other.

    A script that ends while others are in a step is no conflict: the closing agreement decides
    that.
    """
    kinds = {_kind(call) for call in calls}
    return (len(kinds) > 1 and kinds != {Call.STEP, Call.END}) or (
        kinds == {Call.STEP} and len(set(calls)) > 1
    )


def explain(calls: Mapping[int, int], grid: Grid) -> str:
    """The message of the error: the call that not all ranks made, where the other ranks are, and
    the remedy."""
    if {_kind(call) for call in calls.values()} == {Call.STEP}:
        where = "; ".join(
            f"{_who(_in(call, calls), calls, grid)} in step {_step(call)}"
            for call in sorted({*calls.values()})
        )
        return (
            f"replicas are in different steps: {where}; take the same steps on all replicas, and resume all of them "
            "from the same checkpoint (is its directory the same on all hosts?)"
        )
    # If the ranks made several calls, the message names the call of the lowest rank.
    subject = next(call for _, call in sorted(calls.items()) if _kind(call) not in (Call.STEP, Call.END))
    others = {rank: call for rank, call in calls.items() if _kind(call) is not _kind(subject)}
    many = len(_numbers(others, calls, grid)) > 1
    where = ", ".join(sorted({_whereabouts(call, many) for call in others.values()}))
    unit = "ranks" if _within(calls, grid) else "replicas"
    missing = f"{_who(others, calls, grid)} did not ({where})"
    return f"{_NAMES[_kind(subject)]} must be called by all {unit}; {missing}\n{_REMEDY}"


def _kind(call: int) -> Call:
    return Call(call & (1 << _CODE_BITS) - 1)


def _step(call: int) -> int:
    return call >> _CODE_BITS


def _in(call: int, calls: Mapping[int, int]) -> list[int]:
    return [rank for rank, theirs in calls.items() if theirs == call]


def _within(calls: Mapping[int, int], grid: Grid) -> bool:
    """Whether ranks of one replica are in different calls."""
    return len({(grid.replica(rank), call) for rank, call in calls.items()}) > len(grid.replicas_of(calls))


def _numbers(ranks: Iterable[int], calls: Mapping[int, int], grid: Grid) -> list[int]:
    return sorted(ranks) if _within(calls, grid) else sorted(grid.replicas_of(ranks))


def _who(ranks: Iterable[int], calls: Mapping[int, int], grid: Grid) -> str:
    numbers = _numbers(ranks, calls, grid)
    unit = "rank" if _within(calls, grid) else "replica"
    return f"{unit}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _whereabouts(call: int, many: bool) -> str:
    kind, they = _kind(call), "they are" if many else "it is"
    if kind is Call.END:
        return "their scripts have ended" if many else "its script has ended"
    return f"{they} in " + (f"step {_step(call)}" if kind is Call.STEP else _NAMES[kind])
