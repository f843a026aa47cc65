"""Hung ranks and stragglers of real jobs: which ranks are fenced, which are named, which are left alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from causes_told import first_causes
from launching import Job
from patience import wait_until
from rank_pids import ranks_of_run
from test_train_runs import _rank as rank_pid
from training import check_lines, finish, losses, small_world, start, train
from worlds import Outcome, run_world

from recover.job.grid import Grid
from recover.runs.report import build
from recover.step import poisoned_sample
from recover.world.liveness.board import PID, STARTED, Board, start_time
from recover.world.slot_notes import RunNotes, blamed
from recover.world.watchdog import (
    STOPPED,
)


def test_board_shows_last_and_stopped_ranks_and_their_activity(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 4)
    children = [subprocess.Popen(["sleep", "100000"]) for _ in range(3)]
    try:
        for rank, pid in enumerate([os.getpid(), *(child.pid for child in children)]):
            board._table[rank, [PID, STARTED]] = pid, start_time(pid)
            board.beat(rank)
            board.in_step(rank, 6)
        board.compute(1, [(3, 43)])
        board.compute(2, [(7, 47), (9, 49), (40, 80), (200, 240), (11, 50)])  # what does not fit is not shown
        for rank in (0, 3):
            board.come_to_vote(rank)
        board.enter(0, 17)
        children[0].send_signal(signal.SIGSTOP)
        assert wait_until(lambda: board.signs_of_life(0)[1].stopped)
        signs = board.signs_of_life(0)
        assert {rank for rank, sign in signs.items() if sign.late} == {1, 2}  # 3 waits for them, as 0 does
        assert {rank for rank, sign in signs.items() if sign.stopped} == {1}
        assert [sign.suspects for sign in signs.values()] == [
            (),
            ((3, 43),),
            ((7, 47), (9, 49), (40, 80)),
            (),
        ]
        assert not any(sign.late for sign in board.signs_of_life(1).values())  # rank 1 has not come, either
        board.compute(2, ())
        for rank in (1, 2):
            board.come_to_vote(rank)
        signs = board.signs_of_life(0)
        assert {rank for rank, sign in signs.items() if sign.late} == {1, 2, 3}
        assert signs[2].suspects == ()
        board.in_step(3, 7)
        assert not board.signs_of_life(0)[3].late
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert set(board.signs_of_life(0)) == {0}


@pytest.mark.guarantee(
    "Faults, hangs and stragglers",
    "A stopped rank and a rank stuck inside a step are fenced, repaired and named as the cause, and a later "
    "SIGCONT has no effect.",
)
@pytest.mark.guarantee(
    "Monitoring", "A fence and a poisoned sample are distinguished from other causes of death."
)
def test_stopped_and_stuck_ranks_are_fenced_and_sigcont_comes_too_late(tmp_path: Path) -> None:
    """Rank 0 is stopped before the first step is through, rank 1 from outside, and rank 3 is stuck, but runs."""
    run_dir = tmp_path / "run"
    kills = ["1:0:backward=stop", "40:3:forward=slow:100000"]
    words = [*small_world(tmp_path), "replicas=5", "accum=2", "steps=100000", "pace=0.02", "hang_limit=2"]
    process = start(run_dir, *words, kills=kills)
    steps = run_dir / "steps.jsonl"
    assert wait_until(lambda: steps.exists() and steps.read_text().count("\n") >= 5)
    stopped = rank_pid(process, 1)
    os.kill(stopped, signal.SIGSTOP)
    assert wait_until(lambda: losses(run_dir) == 3)
    assert not wait_until(lambda: _wakes(stopped), 0.5)
    process.send_signal(signal.SIGTERM)
    run = finish(process, run_dir)
    assert run.code == 0, run.output
    check_lines(run, steps=len(run.steps), batch=10)
    assert sorted(incident["dead_replicas"] for incident in run.incidents) == [[0], [1], [3]]
    ends = [json.loads((run_dir / "ranks" / f"{rank}.end").read_text()) for rank in range(5)]
    assert [end["end"] for end in ends] == ["fenced", "fenced", "done", "fenced", "done"]
    assert "its process has been stopped for 2 s" in ends[1]["detail"]
    assert "it runs, but has done nothing for" in ends[3]["detail"]
    assert ends[3]["detail"] in run.output
    notes_left = [path.name for path in (run_dir / "ranks").glob("*.slot")]
    assert notes_left == ["3.slot"]  # the slot that a stopped rank was computing is not to blame
    assert first_causes(run_dir) == {0: "scheduled", 1: "stopped", 3: "hung"}
    assert re.search(r"lost replica 1 \(\S+: rank 1 was stopped, and was fenced\); repaired in", run.output)


@pytest.mark.soak
def test_stopped_rank_is_fenced_by_default_after_the_documented_limit(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, *small_world(tmp_path), "replicas=4", "accum=2", "steps=100000", "pace=0.1")
    steps = run_dir / "steps.jsonl"
    assert wait_until(lambda: steps.exists() and steps.read_text().count("\n") >= 5)
    stopped, at = rank_pid(process, 1), time.monotonic()
    os.kill(stopped, signal.SIGSTOP)
    assert wait_until(lambda: losses(run_dir) == 1)
    assert time.monotonic() - at > STOPPED - 1
    assert not wait_until(lambda: _wakes(stopped), 0.5)
    process.send_signal(signal.SIGTERM)
    run = finish(process, run_dir)
    assert run.code == 0, run.output
    check_lines(run, steps=len(run.steps), batch=8)
    assert [incident["dead_replicas"] for incident in run.incidents] == [[1]]


@pytest.mark.guarantee(
    "Faults, hangs and stragglers", "A rank that is stopped during its exit does not block the job."
)
def test_rank_stopped_during_exit_does_not_block_the_job(tmp_path: Path) -> None:
    """After the closing agreement no rank waits for it any more, but the launcher does."""
    script = """
        import os, signal, recover
        from recover.world import rank_exit
        rank_exit.on_success(lambda: world.rank == 1 and os.kill(os.getpid(), signal.SIGSTOP))  # after the world's own
        world = recover.init()
    """
    job = Job(tmp_path, script, "-n", "3", "--hang-limit", "1")
    assert job.finish() == 0, job.stderr
    assert "killed rank 1: its process has been stopped for" in job.stderr
    assert "done on ranks 0, 2" in job.stderr
    assert job.leftovers() == []


@pytest.mark.guarantee(
    "Faults, hangs and stragglers",
    "A job whose replicas are all lost ends, although a rank of them is stopped.",
)
@pytest.mark.soak
@pytest.mark.parametrize(
    "options",
    [pytest.param([], id="openmpi"), pytest.param(["--return", "--return-delay", "100"], id="etcd")],
)
def test_stopped_rank_of_a_lost_replica_does_not_keep_a_lost_job(tmp_path: Path, options: list[str]) -> None:
    """Two replicas of two ranks: one rank is stopped, and then all others are killed."""
    words = [*small_world(tmp_path / "world"), "parallel=hsdp", "shard=2", "microbatch_size=2"]
    many = ["replicas=2", "accum=2", "steps=100000", "pace=0.05", "hang_limit=2"]
    run_dir = tmp_path / "run"
    process = start(run_dir, *words, *many, *options)
    assert wait_until((run_dir / "steps.jsonl").exists)
    pids = {rank: pid for rank, (pid, _) in ranks_of_run(run_dir).items()}
    os.kill(pids[2], signal.SIGSTOP)
    for rank in (0, 1, 3):
        os.kill(pids[rank], signal.SIGKILL)
    run = finish(process, run_dir)
    assert run.code == 1, run.output
    assert re.search("killed rank 2.*: its process has been stopped for 2 s", run.output), run.output


def stalls(tmp_path: Path, **more: float) -> tuple[Outcome, dict[int, str]]:
    """Run five replicas with a hang limit of 1.5 s and longer stalls. Returns the outcome, and the ranks' logs."""
    options = {"hold": 2.5, "stall": 3, "sample": 3, **more}
    outcome = run_world("stalls.py", tmp_path / "run", 5, [options], hang_limit=1.5)
    logs = {rank: tmp_path / "run" / "ranks" / f"{rank}.log" for rank in range(5)}
    return outcome, {rank: log.read_text() if log.exists() else "" for rank, log in logs.items()}


@pytest.mark.guarantee(
    "Faults, hangs and stragglers",
    "A held interpreter lock between steps and a stall of most replicas cost no rank; a slow sample costs "
    "one replica.",
)
@pytest.mark.soak
def test_slow_sample_costs_one_replica_and_a_stall_of_most_costs_none(tmp_path: Path) -> None:
    outcome, logs = stalls(tmp_path)
    assert outcome.code == 0, outcome.output
    lost = [rank for rank, end in outcome.ends.items() if end != "done"]
    assert lost == [1], (
        outcome.output
    )  # rank 1 ran slot 3, which takes too long; the next rank got more time for it
    assert "in step 7, slot 3 (sample 63), so rank" in outcome.output
    assert {tuple(entry["replicas"]) for entry in outcome.notes(0, "commit")[:6]} == {(0, 1, 2, 3, 4)}
    assert outcome.notes(0, "commit")[-1] == {"kind": "commit", "step": 10, "replicas": [0, 2, 3, 4]}
    assert "waiting for 4 of 5 replicas" in logs[0]
    assert re.search(r"rank 4 for \d+ s in step 5, slot 8 \(sample 48\)", logs[0])
    assert list(notes_in(tmp_path / "run", 7)) == [(1, ((3, 63),))]


@pytest.mark.guarantee(
    "Faults, hangs and stragglers", "A slot that has cost two replicas ends the run, however each was lost."
)
@pytest.mark.soak
def test_sample_that_hangs_two_replicas_ends_the_run(tmp_path: Path) -> None:
    outcome, _ = stalls(tmp_path, last=1000)
    assert outcome.code == 1
    ends = [outcome.ends[rank] for rank in range(5)]
    assert sorted(ends) == ["fenced", "fenced", "fenced", "raised", "raised"], outcome.output
    assert "PoisonedSampleError: slot 3 of step 9 (sample 83) has cost replicas 2, " in outcome.output
    assert "it runs, but has done nothing for 9 s" in outcome.output


def notes_in(run_dir: Path, step: int) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    yield from ((note.rank, note.suspects) for note in RunNotes(str(run_dir), 0).read(step))


@pytest.mark.guarantee(
    "Faults, hangs and stragglers", "A slot that has cost two replicas ends the run, however each was lost."
)
def test_slot_that_cost_two_replicas_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    notes, grid = RunNotes(str(tmp_path), 0), Grid(4, 2)
    notes.leave(6, [(2, 42), (3, 43)], "it has done nothing for 60 s", rank=2)
    notes.leave(6, [(2, 42), (3, 43)], "it has done nothing for 60 s", rank=3)  # of the same replica
    notes.leave(5, [(3, 33)], "it has done nothing for 60 s", rank=0)
    poisoned_sample.check(notes, 6, grid)
    assert blamed(notes, 6) == {(2, 42), (3, 43)}
    notes.leave(6, [(3, 43)], "it raised: ValueError", rank=7)
    poisoned_sample.check(notes, 5, grid)
    with pytest.raises(
        poisoned_sample.PoisonedSampleError, match=r"slot 3 of step 6 \(sample 43\) has cost replicas 1, 3"
    ):
        poisoned_sample.check(notes, 6, grid, members=[0, 1, 4, 5])
    # As long as the other replica counts among the living, some ranks may not have read its note: all or none must end.
    poisoned_sample.check(notes, 6, grid, members=[0, 1, 4, 5, 6, 7])


def _wakes(pid: int) -> bool:
    """Send SIGCONT. Returns whether the process still exists."""
    try:
        os.kill(pid, signal.SIGCONT)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.guarantee(
    "Faults, hangs and stragglers",
    "A pause of a second evicts no rank by default, and a straggler is named with its factor.",
)
def test_pause_evicts_no_rank_by_default_and_a_straggler_is_named(tmp_path: Path) -> None:
    words = [*small_world(tmp_path), "replicas=3", "accum=2", "steps=13", "microbatch_size=64"]
    run = train(tmp_path / "run", *words, kills=["3:2:forward=slow:12", "6:1:in-reduce=pause:1"])
    assert run.code == 0, run.output
    check_lines(run, steps=13, batch=6)
    assert (run.incidents, run.summary["failures"]) == ([], 0)
    assert run.steps[5]["seconds"] > 0.9
    named = [line["stragglers"] for line in run.steps if "stragglers" in line]
    assert set(named[-1]) == {"2"}, named
    assert named[-1]["2"] > 1.5
    assert "replica 2 takes" in run.output
    assert "replica 2 takes" in (run.run_dir / "ranks" / "0.log").read_text()
    page = build([run.run_dir], tmp_path / "report").read_text()
    assert "Replica 2 took up to" in page
