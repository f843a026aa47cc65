"""When the processes of other ranks are looked up, and what is reported of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recover.world.liveness import exiting
from recover.world.liveness.board import Board, start_time
from recover.world.liveness.exiting import QUIET, ExitingRanks, is_exiting


@pytest.fixture
def board(tmp_path: Path) -> Board:
    """Rows 0 to 2 of 4 are claimed."""
    board = Board(tmp_path / "board", 4)
    for rank in range(3):
        board.claim(rank)
    return board


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pids that were looked up; none of their processes is exiting. The pid of rank r is 10 + r."""
    pids: list[int] = []
    monkeypatch.setattr(Board, "process", lambda self, rank: (10 + rank, 0))
    monkeypatch.setattr(exiting, "is_exiting", lambda pid, started: bool(pids.append(pid)))
    return pids


def test_only_ranks_without_heartbeat_are_looked_up(board: Board, looked_up: list[int]) -> None:
    ranks, now = ExitingRanks(board, 0), 100.0
    for _ in range(20):
        board.beat(1)
        ranks.look(now)
        now += QUIET
    assert set(looked_up) == {12}, "rank 0 looks, rank 1 beats, and rank 3 has never started"


def test_rank_without_heartbeat_is_looked_up_seldom(board: Board, looked_up: list[int]) -> None:
    """A rank that holds the interpreter for long must not cost the others much."""
    ranks, passes = ExitingRanks(board, 0), 40
    for number in range(passes):
        board.beat(1)
        ranks.look(100.0 + number * QUIET / 4)
    assert 0 < len(looked_up) <= passes / 4


def test_exiting_rank_is_found_once(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exiting, "is_exiting", lambda pid, started: True)
    ranks = ExitingRanks(board)
    assert ranks.look(100.0) == [], "each rank has just been seen for the first time"
    board.beat(2)
    assert ranks.look(100.0 + QUIET) == [0, 1]
    assert ranks.look(100.0 + 3 * QUIET) == [2]
    assert ranks.look(100.0 + 6 * QUIET) == []


def test_rank_whose_row_was_cleared_is_found_again(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exiting, "is_exiting", lambda pid, started: pid == os.getpid())
    ranks = ExitingRanks(board, 0)
    ranks.look(100.0)
    assert ranks.look(101.0) == [1, 2]
    board.forget(1)
    assert ranks.look(102.0) == []
    board.claim(1)
    ranks.look(103.0)
    assert ranks.look(104.0) == [1]


def test_running_process_is_not_exiting() -> None:
    me = os.getpid()
    assert not is_exiting(me, start_time(me))
    assert is_exiting(me, start_time(me) + 1), "the process of the row is gone, and its pid was used again"
