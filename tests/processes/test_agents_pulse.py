"""A rank that hangs is found though nobody on its host waits for it: agents tell each other how far their ranks are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from recover.agent.agent_pulse import EVERY, Pulse, fence
from recover.etcd.etcd_client import EtcdClient
from recover.etcd.etcd_server import EtcdServer
from recover.job.grid import Grid
from recover.launch.etcd_notes import EtcdNotes
from recover.liveness.board import Board
from recover.world.notes import RunNotes

pytestmark = pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning")
LIMIT = 10 * EVERY


class Killable(Board):
    """Rows are those of this process, which nobody may kill."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(path, size)
        self.killed: list[int] = []

    def kill(self, rank: int) -> None:
        self.killed.append(rank)


def test_a_rank_that_hangs_is_killed_by_its_own_agent_while_other_hosts_wait(
    server: EtcdServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three hosts. On the second, one replica of two ranks: one is stuck in a sample, and its mate in a collective."""
    etcd, grid = EtcdClient(server.endpoint, prefix=prefix), Grid.of(6, 2)
    (tmp_path / "ranks").mkdir()
    boards = [Killable(tmp_path / f"board-{host}", 6) for host in range(3)]
    pulses = [
        Pulse(etcd, f"h{host}", board, [2 * host, 2 * host + 1], grid, LIMIT)
        for host, board in enumerate(boards)
    ]
    notes = [EtcdNotes(etcd, -1, RunNotes(str(tmp_path), -1)) for _ in boards]
    now = [100.0]
    monkeypatch.setattr("recover.agent.agent_pulse.time.monotonic", lambda: now[0])

    def pass_by(seconds: float) -> None:
        for _ in np.arange(0.0, seconds, EVERY):
            now[0] += EVERY
            for host, (board, pulse) in enumerate(zip(boards, pulses, strict=True)):
                for rank in (2 * host, 2 * host + 1):
                    board.beat(rank)
                fence(pulse, board, notes[host], tmp_path)

    for host, board in enumerate(boards):
        for rank in (2 * host, 2 * host + 1):
            board.claim(rank)
    for step in (1, 2, 3):  # steps that all take
        for host, board in enumerate(boards):
            for rank in (2 * host, 2 * host + 1):
                board.in_step(rank, step)
                board.come_to_vote(rank)
                board.accomplish(rank)
        pass_by(EVERY)  # one takes so long, and ten of them are the limit
    for host, board in enumerate(boards):
        for rank in (2 * host, 2 * host + 1):
            board.in_step(rank, 4)
            if host != 1:
                board.come_to_vote(rank)
    boards[1].compute(2, [(7, 43)])
    pass_by(LIMIT - 1)
    boards[1].touch(2)  # it was only slow
    boards[1].touch(3)
    pass_by(LIMIT - 1)
    assert [board.killed for board in boards] == [[], [], []]
    pass_by(2.0)
    assert boards[0].killed == boards[2].killed == []
    assert set(boards[1].killed) == {2, 3}
    marker = json.loads((tmp_path / "ranks" / "2.end").read_text())
    assert marker["end"] == "fenced"
    assert "in step 4, slot 7 (sample 43)" in marker["detail"]
    assert [(note.rank, note.suspects) for note in notes[0].read(4)] == [(2, ((7, 43),))]
