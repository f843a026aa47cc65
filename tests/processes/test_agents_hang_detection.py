"""A rank that hangs is found though no rank on its host waits for it: agents report to each other how far ranks are."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import start_line

from recover.job.grid import Grid
from recover.launch.hosts.hang_detection import EVERY, HangDetector, fence
from recover.launch.hosts.placement import Seat
from recover.launch.hosts.run_directory import write_placement
from recover.runs.live.view import RunView
from recover.runs.records.job_log import JobLog
from recover.world.fabrics.etcd.client import EtcdClient
from recover.world.fabrics.etcd.server import EtcdServer
from recover.world.fabrics.etcd.slot_notes import EtcdNotes
from recover.world.liveness.board import Board
from recover.world.slot_notes import RunNotes
from recover.world.watchdog import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning")
LIMIT = 10 * EVERY


class Killable(Board):
    """All rows have the pid of this process: it records kills instead of sending them."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(path, size)
        self.killed: list[int] = []
        self.stopped: set[int] = set()

    def living(self) -> dict[int, tuple[list[int], str]]:
        return {
            rank: (row, "T" if rank in self.stopped else state)
            for rank, (row, state) in super().living().items()
        }

    def kill(self, rank: int) -> None:
        self.killed.append(rank)


@pytest.mark.guarantee(
    "Several hosts",
    "An agent kills its own hung rank although no rank on its host waits for it, and records its microbatch "
    "for all hosts.",
)
@pytest.mark.parametrize("patience", [1.0, PATIENCE])
def test_agent_kills_its_own_hung_rank(
    server: EtcdServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """Three hosts. On the second, one replica of two ranks: one is stuck in a sample, and its peer in a collective.

    If the sample has cost a replica of another host before, they have more time for it.
    """
    etcd, grid = EtcdClient(server.endpoint, prefix=prefix), Grid.of(6, 2)
    (tmp_path / "ranks").mkdir()
    boards = [Killable(tmp_path / f"board-{host}", 6) for host in range(3)]
    notes = [EtcdNotes(etcd, -1, RunNotes(str(tmp_path), -1)) for _ in boards]
    pulses = [
        HangDetector(etcd, f"h{host}", board, [2 * host, 2 * host + 1], grid, LIMIT, notes[host])
        for host, board in enumerate(boards)
    ]
    now = [100.0]
    monkeypatch.setattr("recover.launch.hosts.hang_detection.time.monotonic", lambda: now[0])

    def pass_by(seconds: float) -> None:
        for _ in np.arange(0.0, seconds, EVERY):
            now[0] += EVERY
            for host, (board, pulse) in enumerate(zip(boards, pulses, strict=True)):
                for rank in (2 * host, 2 * host + 1):
                    board.beat(rank)
                fence(pulse, board, tmp_path)

    for host, board in enumerate(boards):
        for rank in (2 * host, 2 * host + 1):
            board.claim(rank)
    for step in (1, 2, 3):  # steps that all ranks take
        for host, board in enumerate(boards):
            for rank in (2 * host, 2 * host + 1):
                board.in_step(rank, step)
                board.come_to_vote(rank)
                board.accomplish(rank)
        pass_by(EVERY)  # a step takes this long, and ten of them are the limit
    for host, board in enumerate(boards):
        for rank in (2 * host, 2 * host + 1):
            board.in_step(rank, 4)
            if host != 1:
                board.come_to_vote(rank)
    for rank in (2, 3):
        boards[1].compute(rank, [(7, 43)])
    if patience > 1:
        notes[0].leave(4, [(7, 43)], "it did nothing", rank=9)
    pass_by(patience * LIMIT - 1)
    boards[1].touch(2)  # it was only slow
    boards[1].touch(3)
    pass_by(patience * LIMIT - 1)
    assert [board.killed for board in boards] == [[], [], []]
    pass_by(2.0)
    assert boards[0].killed == boards[2].killed == []
    assert set(boards[1].killed) == {2, 3}
    marker = json.loads((tmp_path / "ranks" / "2.end").read_text())
    assert marker["end"] == "fenced"
    assert "in step 4, slot 7 (sample 43)" in marker["detail"]
    assert {(note.rank, note.suspects) for note in notes[0].read(4) if note.rank < 6} == {
        (rank, ((7, 43),)) for rank in (2, 3)
    }


@pytest.mark.guarantee(
    "Several hosts",
    "Agents kill stopped ranks only while a complete replica that holds the state is running.",
)
@pytest.mark.parametrize(
    ("stopped", "joins", "fenced"),
    [
        ({0, 1, 2, 3}, False, set()),  # the whole job
        ({1, 2, 3}, False, set()),  # of the last replica one of two ranks is stopped
        ({2, 3}, False, {2, 3}),
        ({3}, False, {3}),
        ({0, 1, 2, 3, 4, 5}, True, set()),
        ({0, 1, 2, 3}, True, {0, 1, 2, 3}),  # the joined replica can go on
    ],
)
def test_agent_kills_stopped_ranks_only_while_a_replica_holds_the_state(
    server: EtcdServer,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stopped: set[int],
    joins: bool,
    fenced: set[int],
) -> None:
    """Two replicas of two ranks, one on each of two hosts, and a third, which joins on the second host; if all were
    stopped, the ranks of one host go on a moment before the others."""
    etcd, grid = EtcdClient(server.endpoint, prefix=prefix), Grid.of(4, 2)
    (tmp_path / "ranks").mkdir()
    boards, places = [Killable(tmp_path / f"board-{host}", 6) for host in range(2)], [(0, 1), (2, 3, 4, 5)]
    notes = RunNotes(str(tmp_path), -1)
    pulses = [
        HangDetector(etcd, f"h{host}", board, mine, grid, LIMIT, notes)
        for host, (board, mine) in enumerate(zip(boards, places, strict=True))
    ]
    now = [100.0]
    monkeypatch.setattr("recover.launch.hosts.hang_detection.time.monotonic", lambda: now[0])

    def pass_by(seconds: float) -> None:
        for _ in np.arange(0.0, seconds, EVERY):
            now[0] += EVERY
            for board, pulse, mine in zip(boards, pulses, places, strict=True):
                for rank in set(mine) - board.stopped:
                    board.beat(rank)
                fence(pulse, board, tmp_path)

    for board, mine in zip(boards, places, strict=True):
        for rank in mine:
            board.claim(rank)
            if rank < 4 or joins:
                board.in_step(rank, 3)
                board.come_to_vote(rank)
            if rank >= 4 and joins:
                board.hold_state(rank)
    pass_by(2 * EVERY)
    for board in boards:
        board.stopped = set(stopped)
    pass_by(2 * LIMIT)
    assert {rank for board in boards for rank in board.killed} == fenced
    if not fenced:
        for board in boards:
            board.stopped = set()
            pass_by(2 * EVERY)
        pass_by(LIMIT)
        assert [board.killed for board in boards] == [[], []]


@pytest.mark.guarantee(
    "Monitoring", "The page of any host shows the ranks of all hosts, and says so where it does not know."
)
def test_page_of_any_host_shows_the_ranks_of_all_hosts(
    server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    """Two hosts with a run directory in common, each with a session and clocks of its own."""
    run_dir, grid = tmp_path / "run", Grid.of(4, 2)
    run_dir.mkdir()
    sessions = {host: tmp_path / host for host in ("h0", "h1")}
    pulses = []
    for number, (host, session) in enumerate(sessions.items()):
        session.mkdir()
        board, mine = Board(session / "board", 4), (2 * number, 2 * number + 1)
        for rank in mine:
            board.claim(rank)
            board.in_step(rank, 7)
        board.compute(mine[0], [(5 + number, 40)])
        board.come_to_vote(mine[1])
        etcd = EtcdClient(server.endpoint, prefix=prefix)
        notes = EtcdNotes(etcd, -1, RunNotes(str(run_dir), -1))
        pulses.append(HangDetector(etcd, host, board, mine, grid, None, notes, session))
        JobLog(run_dir, host).write(
            start_line(4, replica_size=2, host=host, session=str(session), run=prefix)
        )
    write_placement(
        run_dir, "job", {h: {"address": ""} for h in sessions}, {r: Seat(f"h{r // 2}", r % 2) for r in range(4)}, False
    )  # fmt: skip
    for pulse in (*pulses, pulses[0]):  # in its first look the first host knew nothing of the second
        pulse.look(time.monotonic() + 10 * len(pulses))
        pulse._looked = float("-inf")
    expected = [
        {"rank": 0, "replica": 0, "host": "h0", "doing": "computing", "step": 7, "slots": [5]},
        {"rank": 1, "replica": 0, "host": "h0", "doing": "reducing", "step": 7, "slots": []},
        {"rank": 2, "replica": 1, "host": "h1", "doing": "computing", "step": 7, "slots": [6]},
        {"rank": 3, "replica": 1, "host": "h1", "doing": "reducing", "step": 7, "slots": []},
    ]

    def shown() -> list[dict[str, Any]]:
        view = RunView(run_dir)
        view.refresh()
        assert view.state()["hosts"] == ["h0", "h1"]
        ranks = view.ranks()
        for entry in ranks:
            assert not entry.pop("past")
            since = entry.pop("since")
            assert since is None or abs(time.time() - since) < 60
        return ranks

    for gone, here in (("h1", "h0"), ("h0", "h1")):  # as each host sees it, which has its own session alone
        away = sessions[gone].rename(tmp_path / "away")
        assert shown() == expected, here
        away.rename(sessions[gone])
    for session in sessions.values():  # as any other machine sees it, or when they are gone
        session.rename(session.with_suffix(".gone"))
    assert {entry["doing"] for entry in shown()} == {"not known"}
    assert [entry["host"] for entry in shown()] == ["h0", "h0", "h1", "h1"]
