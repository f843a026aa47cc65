"""When the processes of other ranks are looked up, and what is reported of them."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recover_lab.simulated_world.fabric import SimulatedFabric
from recover_lab.simulated_world.parts import simulated_parts
from recover_lab.simulated_world.scheduler import Simulation

from recover.job.grid import Grid
from recover.job.spec import JobSpec
from recover.world.carriers.base import DataCarriers
from recover.world.carriers.host_and_device import HostAndDeviceCarriers
from recover.world.carriers.nccl import NcclCarriers
from recover.world.liveness import exiting
from recover.world.liveness.board import Board, start_time
from recover.world.liveness.exiting import QUIET, ExitingRanks, is_exiting
from recover.world.world import World


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


def test_rank_whose_device_writes_to_others_is_not_looked_up(board: Board, looked_up: list[int]) -> None:
    """Kernels of NCCL may write to memory of the survivors until the process is gone."""
    board.write_remotely(2)
    ranks = ExitingRanks(board, 0)
    ranks.look(100.0)
    ranks.look(101.0)
    assert looked_up == [11]


def test_only_nccl_writes_to_memory_of_others() -> None:
    worker: Any = None
    carriers: Any = SimpleNamespace(settle=0.0, writes_remotely=False)
    device: Any = SimpleNamespace(settle=0.0, writes_remotely=NcclCarriers.writes_remotely)
    assert HostAndDeviceCarriers(device, carriers, worker).writes_remotely
    assert not DataCarriers.writes_remotely


@pytest.mark.parametrize("writes", [False, True])
def test_rank_shows_whether_its_device_writes_to_others(writes: bool) -> None:
    simulation = Simulation(Grid(2), 0)
    fabric = SimulatedFabric(simulation, 0)
    shown: list[int] = []
    parts = simulated_parts(simulation, fabric)
    board: Any = SimpleNamespace(write_remotely=shown.append, enter_world=lambda rank: None)
    parts.carriers.writes_remotely = writes
    World(JobSpec(2, joining=True, token="secret"), Grid(2), replace(parts, liveness=board))
    assert shown == [0] * writes


class Kernel:
    """A `/proc` of one process, which started at 5, by the flags of its threads. An OSError is raised."""

    def __init__(self, threads: dict[str, int | OSError], lists: list[list[str]] | None = None) -> None:
        self._threads = threads
        self._lists = lists or [list(threads)] * 2

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exiting, "_stat", self._stat)
        monkeypatch.setattr(os, "listdir", lambda path: self._lists.pop(0))

    def _stat(self, path: str) -> list[str]:
        found = self._threads[path.removesuffix("/stat").rpartition("/")[2]]
        if isinstance(found, OSError):
            raise found
        return ["R", *["0"] * 5, str(found), *["0"] * 12, "5", *["0"] * 30]


DYING, ALIVE = 0x4, 0x40
FULL = OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("kernel", "started", "expected"),
    [
        (Kernel({"7": DYING, "8": DYING}), 5, True),
        (Kernel({"7": DYING, "8": ALIVE}), 5, False),
        (Kernel({"7": ALIVE, "8": DYING}), 5, False),
        (Kernel({"7": DYING, "8": FileNotFoundError()}), 5, True),
        (Kernel({"7": DYING, "8": FULL}), 5, False),
        (Kernel({"7": FULL}), 5, False),
        (Kernel({"7": FileNotFoundError()}), 5, False),
        (Kernel({"7": DYING}), 6, False),
        (Kernel({"7": DYING, "9": ALIVE}, [["7"], ["7", "9"]]), 5, False),
    ],
    ids=[
        *("all threads", "a thread runs", "the main thread runs", "a thread is gone", "no descriptor"),
        *("no descriptor at all", "hidden or gone", "another process", "a new thread"),
    ],
)
def test_only_a_process_that_is_seen_to_exit_is_exiting(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel, started: int, expected: bool
) -> None:
    """A wrong answer costs a healthy rank. The end of any other process is reported by its parent."""
    kernel.install(monkeypatch)
    assert is_exiting(7, started) is expected


def test_running_process_is_not_exiting() -> None:
    me = os.getpid()
    assert not is_exiting(me, start_time(me))
