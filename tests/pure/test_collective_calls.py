"""Which collective calls may meet, how ranks see each other's calls, and the errors that a user gets."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from recover.job.grid import Grid
from recover.world.calls import Call, conflict, explain, position
from recover.world.census import Row
from recover.world.liveness.board import Board
from recover.world.membership import WORD_BITS, Phase

IN_STEP_4, IN_STEP_5 = Call.STEP.at(4), Call.STEP.at(5)
SAVING, ENDED = Call.SAVE.at(3), Call.END.at(3)


def test_phases_and_calls_of_one_agreement_are_distinct() -> None:
    for codes in ([*Phase], [call.word for call in Call]):
        for one, other in combinations(codes, 2):
            assert one & other not in codes
    assert all(call.word < 1 << WORD_BITS for call in Call)


def test_calls_conflict_only_if_they_differ() -> None:
    assert not conflict([])
    assert not conflict([SAVING, SAVING])
    assert conflict([SAVING, IN_STEP_4])
    assert conflict([SAVING, ENDED])
    assert conflict([SAVING, ENDED, IN_STEP_4])
    assert conflict([IN_STEP_4, IN_STEP_5])
    assert conflict([Call.RESUME.at(0), Call.AGREE.at(0)])
    # The closing agreement settles the case in which some scripts end while others still take steps.
    assert not conflict([ENDED, IN_STEP_4])
    assert not conflict([ENDED, Call.END.at(2)])


@pytest.mark.parametrize(
    ("grid", "calls", "told"),
    [
        (
            Grid(3),
            {0: SAVING, 1: IN_STEP_4, 2: IN_STEP_4},
            "recover.save must be called by all replicas; replicas 1, 2 did not (they are in step 4)",
        ),
        (
            Grid(2, 2),
            {0: SAVING, 1: SAVING, 2: IN_STEP_4, 3: IN_STEP_4},
            "recover.save must be called by all replicas; replica 1 did not (it is in step 4)",
        ),
        (
            Grid(2, 2),
            {0: SAVING, 1: IN_STEP_4, 2: IN_STEP_4, 3: IN_STEP_4},
            "recover.save must be called by all ranks; ranks 1, 2, 3 did not (they are in step 4)",
        ),
        (
            Grid(3),
            {0: Call.CONFIRM.at(3), 1: SAVING, 2: ENDED},
            "step.confirm must be called by all replicas; replicas 1, 2 did not (their scripts have ended, they are in "
            "recover.save)",
        ),
        (
            Grid(3),
            {0: IN_STEP_4, 1: IN_STEP_5, 2: IN_STEP_4},
            "replicas are in different steps: replicas 0, 2 in step 4; replica 1 in step 5; take the same steps on all "
            "replicas, and resume all of them from the same checkpoint (is its directory the same on all hosts?)",
        ),
    ],
)
def test_call_error_names_the_call_and_the_position_of_the_others(
    grid: Grid, calls: dict[int, int], told: str
) -> None:
    first, *remedy = explain(calls, grid).splitlines()
    assert first == told
    assert all("step.loss" in line and "extra=" in line and "if rank == 0" in line for line in remedy)


def test_board_shows_calls_at_the_same_position_only(tmp_path: Path) -> None:
    """A rank that has not come to a call yet counts as in no other call, however long it takes."""
    board = Board(tmp_path / "board", 4)
    for rank in range(4):
        board.claim(rank)
    assert board.calls_beside(0) == {}
    board.announce(0, SAVING, position(7, 0))
    board.announce(1, Call.STEP.at(3), position(6, 0))
    board.announce(2, IN_STEP_4, position(7, 0))
    board.announce(3, IN_STEP_4, position(7, 1))
    assert board.calls_beside(0) == {0: SAVING, 2: IN_STEP_4}
    assert board.calls_beside(1) == {1: Call.STEP.at(3)}
    board.announce(2, 0, 0)
    assert board.calls_beside(0) == {0: SAVING}


def test_census_row_carries_the_call() -> None:
    row = Row(b"offer", b"record", epoch=3, before=(0, 2), call=SAVING)
    assert Row.from_bytes(row.to_bytes(5)) == (5, row)
