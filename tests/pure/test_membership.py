"""Evictions where no rank dies, and still no carrier can be built."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from recover.job.grid import Grid
from recover.world.carriers.contract import CarrierError, TookTooLongError
from recover.world.census import ARRIVAL, Row
from recover.world.failing_members import FAILURES, Failing, failing_members
from recover.world.membership import WORD_BITS, Membership, NoCarrierError


def left_out(rows: dict[int, Row], size: int = 1) -> frozenset[int]:
    fabric: Any = SimpleNamespace(rank=0, linger=lambda seconds: None)
    carriers: Any = None
    return (
        Membership(fabric, Grid(4, size), carriers, lambda location, detail: None)
        ._failing_members(rows)
        .ranks
    )


def row(built: int, epoch: int, waited: int = 0) -> Row:
    made = Row(b"", b"", built=built, waited=waited, epoch=epoch)
    assert Row.from_bytes(made.to_bytes(3)) == (3, made)
    return made


@pytest.mark.guarantee(
    "Membership",
    "Joining ranks are removed before members when all fail to build a carrier, and the slot of such a rank "
    "is struck.",
)
@pytest.mark.parametrize("newcomers", [(8,), (8, 9), (8, 9, 10, 11, 12)])
def test_joining_ranks_are_removed_before_members_when_all_fail_alike(
    newcomers: tuple[int, ...],
) -> None:
    members = {rank: row(FAILURES, epoch=7) for rank in range(4)}
    assert left_out(members | {rank: row(FAILURES, epoch=0) for rank in newcomers}) == set(newcomers)
    one_of_many = {rank: row(FAILURES if rank == 2 else 1, epoch=7) for rank in range(6)}
    assert left_out(one_of_many | {8: row(FAILURES, epoch=0)}) == {8}, (
        "one member fails like the rank that joins, with whom it had no connection before"
    )
    # The same holds where the joining ranks have only waited and the members have failed, and where all have only
    # waited.
    if len(newcomers) < 5:
        assert left_out(members | {rank: row(1, epoch=0) for rank in newcomers}) == set(newcomers)
    waiting = {rank: row(0, epoch=7, waited=FAILURES) for rank in range(4)}
    assert left_out(waiting | {rank: row(0, epoch=0) for rank in newcomers}) == set(newcomers)
    assert not left_out(waiting)


def test_member_that_fails_most_often_is_removed_although_a_rank_joins() -> None:
    rows = {rank: row(FAILURES if rank == 2 else 1, epoch=7, waited=2) for rank in range(4)}
    rows[8] = row(1, epoch=0, waited=FAILURES)
    assert left_out(rows) == {2}


@pytest.mark.parametrize("epoch", [0, 7])
def test_world_ends_when_all_members_fail_alike(epoch: int) -> None:
    with pytest.raises(NoCarrierError, match="half of the replicas or more failed"):
        left_out({rank: row(FAILURES, epoch) for rank in range(4)})


MEMBER, JOINS = 7, 0  # epochs: of a member, and of a rank that joins


FAILING = {
    "nobody failed": ({0: row(0, MEMBER), 1: row(0, MEMBER)}, 1, Failing()),
    "below the limit": ({0: row(FAILURES - 1, MEMBER), 1: row(0, MEMBER)}, 1, Failing()),
    "members that only waited": ({0: row(0, MEMBER, FAILURES), 1: row(0, MEMBER)}, 1, Failing()),
    "cannot make a carrier": (
        {0: Row(b"", b"", own=FAILURES), 1: row(0, MEMBER), 2: Row(b"", b"", own=FAILURES)},
        1,
        Failing(frozenset({0, 2})),
    ),
    "no rank can make a carrier": (
        {rank: Row(b"", b"", own=FAILURES) for rank in range(2)},
        1,
        Failing(hopeless=f"no replica could make a carrier in {FAILURES} rounds"),
    ),
    "no whole replica can make a carrier": (
        {rank: Row(b"", b"", own=FAILURES * (rank % 2)) for rank in range(4)},
        2,
        Failing(hopeless=f"no replica could make a carrier in {FAILURES} rounds"),
    ),
    "one of three": (
        {0: row(FAILURES, MEMBER), 1: row(1, MEMBER), 2: row(1, MEMBER)},
        1,
        Failing(frozenset({0})),
    ),
    "one of two": (
        {0: row(FAILURES, MEMBER), 1: row(1, MEMBER)},
        1,
        Failing(hopeless=f"half of the replicas or more failed in {FAILURES} rounds"),
    ),
    "one of two, the other joins": (
        {0: row(FAILURES, MEMBER), 1: row(1, JOINS)},
        1,
        Failing(frozenset({1})),
    ),
    "one of two, the other joins in instalments": (
        {0: row(FAILURES, MEMBER), 1: replace(row(1, MEMBER), record=ARRIVAL)},
        1,
        Failing(frozenset({1})),
    ),
    "one of three, the others join": (
        {0: row(FAILURES, MEMBER), 1: row(1, JOINS), 2: replace(row(1, MEMBER), record=ARRIVAL)},
        1,
        Failing(frozenset({1, 2})),
    ),
    "both ranks of one replica of three": (
        {rank: row(FAILURES if rank < 2 else 1, MEMBER) for rank in range(6)},
        2,
        Failing(frozenset({0, 1})),
    ),
    "at the start of a job nobody joins": (
        {0: row(FAILURES, JOINS), 1: row(1, JOINS), 2: row(1, JOINS)},
        1,
        Failing(frozenset({0})),
    ),
}


@pytest.mark.parametrize(("rows", "replica_size", "expected"), FAILING.values(), ids=list(FAILING))
def test_failing_members_table(rows: dict[int, Row], replica_size: int, expected: Failing) -> None:
    assert failing_members(rows, Grid(4, replica_size)) == expected


@pytest.mark.parametrize(("error", "counted"), [(CarrierError, 1), (OSError, 1), (TookTooLongError, 0)])
def test_rank_that_waited_in_vain_is_not_at_fault(error: type[Exception], counted: int) -> None:
    def build(*_: Any) -> None:
        raise error("so it is")

    fabric: Any = SimpleNamespace(rank=0)
    carriers: Any = None
    membership: Any = Membership(fabric, Grid(4), carriers, lambda location, detail: None)
    built, told = membership._build(SimpleNamespace(build=build), {}, (0, 1), row(1, epoch=7))
    assert not built
    assert (told.built, told.waited) == (1 + counted, 1 - counted)
    assert "so it is" in told.trouble


@pytest.mark.guarantee(
    "On etcd",
    "Joining ranks are admitted with the last part of the membership bitmap for any number of ranks.",
)
@pytest.mark.parametrize("ranks", [1, WORD_BITS, WORD_BITS + 1, 2 * WORD_BITS, 3 * WORD_BITS + 5])
def test_joining_ranks_are_admitted_with_the_last_part_of_the_bitmap(ranks: int) -> None:
    """An admitted rank votes from the next agreement on, and begins with the first part of a bitmap."""
    admitted: list[frozenset[int]] = []

    def agree(word: int, admit: frozenset[int]) -> int:
        admitted.append(admit)
        return word

    fabric: Any = SimpleNamespace(
        rank=0,
        agree=agree,
        now=lambda: 0.0,
        failed=frozenset,
        acknowledge=frozenset,
        participants=frozenset(range(ranks)),
        asking=lambda: frozenset({ranks}),
    )
    carriers: Any = SimpleNamespace(settle=0.0)
    membership = Membership(fabric, Grid(ranks), carriers, lambda location, detail: None)
    assert membership._agree_on_members(frozenset(), admit=True) == tuple(range(ranks))
    parts = -(-ranks // WORD_BITS)
    assert admitted == [frozenset()] * (parts - 1) + [frozenset({ranks})]
    admitted.clear()
    assert membership._agree_on_members(frozenset(), admit=False) == tuple(range(ranks))
    assert admitted == [frozenset()] * parts
