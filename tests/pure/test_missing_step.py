"""The launcher reports a script that computes and makes no Step, once, after the same CPU time on a busy machine as on
a fast one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recover.launch.missing_step import PATIENCE, MissingStep, cpu_seconds_of
from recover.world.liveness.board import Board


@pytest.fixture
def board(tmp_path: Path) -> Board:
    board = Board(tmp_path / "board", 3)
    for rank in range(3):
        board.join(rank)
    return board


PIDS = {0: 10, 1: 11, 2: 0}


@pytest.mark.guarantee(
    "The launcher",
    "Ranks that compute for some time without `recover.init()` or a `recover.Step` are reported while they run, "
    "and a script without a Step at its end.",
)
@pytest.mark.parametrize("in_world", [False, True])
def test_ranks_that_compute_without_a_step_are_reported_once(board: Board, in_world: bool) -> None:
    used = dict.fromkeys((10, 11), 0.0)
    missing = MissingStep(used.__getitem__)
    if in_world:
        board.enter_world(1)
    assert missing.report(board, PIDS) == ""
    used[10] = PATIENCE
    assert missing.report(board, PIDS) == "", "the other one may still import torch"
    used[11] = PATIENCE
    told = missing.report(board, PIDS)
    assert ("made a recover.Step" if in_world else "called recover.init()") in told
    assert "no death is repaired" in told
    assert missing.report(board, PIDS) == ""


def test_ranks_with_a_step_are_not_reported(board: Board) -> None:
    missing = MissingStep(lambda pid: 2 * PATIENCE)
    board.enter_world(0)
    board.make_step(0)
    assert missing.report(board, PIDS) == ""
    board.enter_world(0)
    assert missing.report(board, {0: 10}) == "", "a second recover.init() changes nothing"


def test_cpu_time_of_a_process_grows_as_it_computes() -> None:
    before, count = cpu_seconds_of(os.getpid()), 0
    while cpu_seconds_of(os.getpid()) < before + 0.05:
        count += sum(range(1000))
    assert before < sum(os.times()[:2]) + 0.1
    assert cpu_seconds_of(2**22 + 1) == 0.0
