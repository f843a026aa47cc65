"""Who is left out where nobody dies, and still no carrier can be built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from recover.carriers.contract import CarrierError, TookTooLongError
from recover.job.grid import Grid
from recover.world.membership import FAILURES, Membership, NoCarrierError
from recover.world.roll_call import Row


def left_out(rows: dict[int, Row], size: int = 1) -> frozenset[int]:
    fabric: Any = SimpleNamespace(rank=0, linger=lambda seconds: None)
    carriers: Any = None
    return Membership(fabric, Grid(4, size), carriers, lambda location, detail: None)._sick(rows)


def row(built: int, epoch: int, own: int = 0) -> Row:
    return Row(b"", b"", built=built, own=own, epoch=epoch)


@pytest.mark.parametrize("newcomers", [(8,), (8, 9), (8, 9, 10, 11, 12)])
def test_where_all_fail_alike_those_go_who_were_to_join_and_never_the_members(
    newcomers: tuple[int, ...],
) -> None:
    members = {rank: row(FAILURES, epoch=7) for rank in range(4)}
    assert left_out(members | {rank: row(FAILURES, epoch=0) for rank in newcomers}) == set(newcomers)
    fewer = members | {rank: row(FAILURES - 1, epoch=0) for rank in newcomers}
    if len(newcomers) < 5:  # otherwise the members are the few: they are what there was before
        with pytest.raises(NoCarrierError):
            left_out(fewer)


def test_a_member_that_fails_more_often_than_all_others_goes_although_somebody_joins() -> None:
    rows = {rank: row(FAILURES if rank == 2 else 1, epoch=7) for rank in range(4)} | {8: row(1, epoch=0)}
    assert left_out(rows) == {2}


@pytest.mark.parametrize("epoch", [0, 7])
def test_where_all_fail_alike_and_nobody_joins_it_is_over(epoch: int) -> None:
    with pytest.raises(NoCarrierError, match="half of the replicas or more failed"):
        left_out({rank: row(FAILURES, epoch) for rank in range(4)})


@pytest.mark.parametrize(("error", "counted"), [(CarrierError, 1), (OSError, 1), (TookTooLongError, 0)])
def test_who_has_waited_for_others_in_vain_is_not_at_fault(error: type[Exception], counted: int) -> None:
    def build(*_: Any) -> None:
        raise error("so it is")

    fabric: Any = SimpleNamespace(rank=0)
    carriers: Any = None
    membership: Any = Membership(fabric, Grid(4), carriers, lambda location, detail: None)
    built, told = membership._build(SimpleNamespace(build=build), {}, (0, 1), row(1, epoch=7))
    assert not built
    assert told.built == 1 + counted
    assert "so it is" in told.trouble
