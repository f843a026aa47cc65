"""Hung ranks: a stopped or stuck one is fenced, a slow one is not, and no machine that has slept kills anybody."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from statistics import median

import pytest
from launching import Job, wait_until
from test_train_runs import _rank as rank_pid
from training import check_lines, finish, small_world, start, train

from recover.job.spec import read_hang_limit
from recover.launch.preflight import Refusal, check_hang_limit
from recover.liveness.board import Board
from recover.report import build
from recover.step.stragglers import NOISE, WINDOW, Stragglers
from recover.world.watchdog import (
    FACTOR,
    FORGOTTEN_AFTER,
    SILENT,
    STUCK,
    AgreementWatchdog,
    HangWatchdog,
    Sign,
)

LOOK = 0.05


class Peer:
    """One other rank, as the board shows it."""

    def __init__(self) -> None:
        self.beats, self.done, self.late = 1, 0, True

    def sign(self) -> Sign:
        return Sign(self.beats, (self.done,), self.late)


def watch(
    watchdog: HangWatchdog, peer: Peer, seconds: float, now: float, ticks: bool, waiting: bool = True
) -> tuple[float | None, float]:
    """Look for so long; when it was found to hang, if so, and the time afterwards."""
    started, found = now, None
    while now - started < seconds:
        now += LOOK
        peer.beats += ticks
        if watchdog.look(waiting, {1: peer.sign()}, now) and found is None:
            found = now - started
    return found, now


def running(limit: float | None = None, step: float = 0.2) -> HangWatchdog:
    watchdog = HangWatchdog(limit)
    watchdog.committed(step)
    return watchdog


def test_a_process_that_does_not_run_is_fenced_after_the_limit_and_a_shorter_pause_costs_nothing() -> None:
    watchdog, peer = running(), Peer()
    found, now = watch(watchdog, peer, SILENT - 1, 100.0, ticks=False)
    assert found is None
    found, now = watch(watchdog, peer, 1, now, ticks=True)
    assert found is None
    found, _ = watch(watchdog, peer, SILENT + 1, now, ticks=False)
    assert found == pytest.approx(SILENT, abs=0.2)


def test_a_rank_that_computes_for_long_is_not_stuck_until_all_have_waited_many_steps_for_it() -> None:
    peer = Peer()
    found, _ = watch(running(step=0.2), peer, STUCK + 2, 0.0, ticks=True)
    assert found == pytest.approx(STUCK, abs=0.2)
    found, _ = watch(running(step=20), peer, FACTOR * 20 + 2, 0.0, ticks=True)
    assert found == pytest.approx(FACTOR * 20, abs=0.2)
    watchdog, now = running(step=0.2), 0.0
    for _ in range(4):  # it finishes a microbatch now and then
        found, now = watch(watchdog, peer, STUCK - 5, now, ticks=True)
        assert found is None
        peer.done += 1


def test_with_one_limit_for_both_a_stopped_process_is_not_said_to_run() -> None:
    watchdog, peer = running(limit=2), Peer()
    _, now = watch(watchdog, peer, 0.3, 0.0, ticks=True)  # busy with a microbatch, then stopped
    found, now = watch(watchdog, peer, 2.5, now, ticks=False)
    assert found == pytest.approx(2, abs=0.2)
    assert "has not run" in watchdog.look(True, {1: peer.sign()}, now + LOOK)[1]


def test_who_waits_for_a_stopped_process_is_not_taken_for_stuck() -> None:
    """One has stopped in the middle of telling an agreement's result; its neighbour waits for it, healthy."""
    watchdog, stopped, neighbour, now = running(limit=5), Peer(), Peer(), 0.0
    fenced: set[int] = set()
    while now < 8:
        now += LOOK
        neighbour.beats += 1
        signs = {2: neighbour.sign()} if 1 in fenced else {1: stopped.sign(), 2: neighbour.sign()}
        fenced |= watchdog.look(True, signs, now).keys()
    assert fenced == {1}


def test_one_who_has_died_meanwhile_needs_no_fence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(tmp_path / "board", 1)
    monkeypatch.setattr(board, "pid", lambda rank: 2**22 + 1)  # it lived when it was looked up
    board.kill(0)


def test_nobody_is_suspected_by_one_who_does_not_wait_outside_of_a_step_or_before_the_first() -> None:
    peer = Peer()
    assert watch(running(), peer, 5 * STUCK, 0.0, ticks=False, waiting=False)[0] is None
    peer.late = False  # it evaluates, or writes a checkpoint
    assert watch(running(), peer, 5 * STUCK, 0.0, ticks=True)[0] is None
    peer.late = True
    assert watch(HangWatchdog(), peer, 5 * STUCK, 0.0, ticks=True)[0] is None
    assert watch(HangWatchdog(), peer, 5 * STUCK, 0.0, ticks=False)[0] == pytest.approx(STUCK, abs=0.2)


def test_a_machine_that_slept_as_a_whole_fences_nobody() -> None:
    watchdog, peer = running(), Peer()
    found, now = watch(watchdog, peer, SILENT - 1, 0.0, ticks=False)
    found, now = watch(watchdog, peer, SILENT - 1, now + 3600, ticks=False)  # this watcher was asleep, too
    assert found is None


def test_no_rank_gives_itself_up_while_a_silent_one_may_hold_the_agreement_up() -> None:
    watchdog, peer = running(), Peer()
    _, now = watch(watchdog, peer, 2.0, 0.0, ticks=False)
    assert watchdog.hushed == [1]
    watch(watchdog, peer, 0.2, now, ticks=True)
    assert watchdog.hushed == []


def test_an_agreement_has_forgotten_whoever_waits_for_seconds_although_others_hold_the_result() -> None:
    def given_up_after(held: list[bool], gap: float = LOOK) -> int | None:
        watchdog = AgreementWatchdog()
        gone = (watchdog.forgotten(7, each, number * gap) for number, each in enumerate(held))
        return next((number for number, left in enumerate(gone) if left), None)

    long = int(FORGOTTEN_AFTER / LOOK)
    assert given_up_after([True] * 2 * long) == pytest.approx(long, abs=2)
    assert given_up_after([False] * 2 * long) is None
    assert (
        given_up_after([True] * (long - 2) + [False] + [True] * (long - 2)) is None
    )  # a silent one explains it
    assert given_up_after([True] * 10, gap=2.0) is None  # this rank was asleep itself


@pytest.mark.parametrize("text", ["0.5", "-3", "soon", "inf", "nan"])
def test_a_limit_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give seconds, 1 or more"):
        read_hang_limit(text)


def test_a_limit_longer_than_the_timeout_is_refused() -> None:
    with pytest.raises(Refusal, match="lower the hang limit or raise the timeout"):
        check_hang_limit(60, timeout=60)
    assert check_hang_limit(2.5, timeout=60) == 2.5


def test_a_straggler_is_named_with_its_factor_once_it_has_been_slow_for_a_while() -> None:
    stragglers = Stragglers()
    for _ in range(WINDOW - 1):
        assert stragglers.committed({0: 0.1, 1: 0.1, 2: 0.35}) == {}
    assert stragglers.committed({0: 0.1, 1: 0.1, 2: 9.0}) == {2: 3.5}  # the median: one step is noise
    assert stragglers.committed({0: 0.1, 2: 0.35}) == {2: 3.5}
    assert stragglers.committed({2: 0.35}) == {}
    unrest = Stragglers()
    assert [unrest.committed({0: NOISE / 10, 1: NOISE / 2}) for _ in range(WINDOW)][-1] == {}


def test_a_stopped_rank_and_a_stuck_one_are_fenced_and_a_later_sigcont_finds_nobody(tmp_path: Path) -> None:
    """Rank 0 is stopped before the first step is through, rank 1 from outside, and rank 3 is stuck, but runs."""
    run_dir = tmp_path / "run"
    kills = ["1:0:backward=stop", "40:3:forward=slow:100000"]
    words = [*small_world(tmp_path), "replicas=4", "accum=2", "steps=45", "pace=0.02", "hang_limit=2"]
    process = start(run_dir, *words, kills=kills)
    steps = run_dir / "steps.jsonl"
    assert wait_until(lambda: steps.exists() and steps.read_text().count("\n") >= 5, 60)
    stopped = rank_pid(process, 1)
    os.kill(stopped, signal.SIGSTOP)
    seen, at = steps.read_text().count("\n"), time.monotonic()
    assert wait_until(lambda: steps.read_text().count("\n") > seen + 2, 30)
    assert (
        1.5 < time.monotonic() - at < 12
    )  # all have waited for it, and not for much longer than the limit of 2 s
    assert not wait_until(lambda: _wakes(stopped), 0.5)
    run = finish(process, run_dir)
    assert run.code == 0, run.output
    check_lines(run, steps=45, batch=8)
    assert [incident["dead_replicas"] for incident in run.incidents] == [[0], [1], [3]]
    ends = [json.loads((run_dir / "ranks" / f"{rank}.end").read_text()) for rank in range(4)]
    assert [end["end"] for end in ends] == ["fenced", "fenced", "done", "fenced"]
    assert "its process has not run for 2 s" in ends[1]["detail"]
    assert "it runs, but has done nothing for" in ends[3]["detail"]
    assert ends[3]["detail"] in run.output


@pytest.mark.soak
def test_a_stopped_rank_is_fenced_within_the_documented_limit_by_default(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, *small_world(tmp_path), "replicas=4", "accum=2", "steps=60", "pace=0.1")
    steps = run_dir / "steps.jsonl"
    assert wait_until(lambda: steps.exists() and steps.read_text().count("\n") >= 5, 60)
    stopped, seen, at = rank_pid(process, 1), steps.read_text().count("\n"), time.monotonic()
    os.kill(stopped, signal.SIGSTOP)
    assert wait_until(lambda: steps.read_text().count("\n") > seen + 1, 60)
    assert SILENT - 1 < time.monotonic() - at < SILENT + 5
    assert not wait_until(lambda: _wakes(stopped), 0.5)
    run = finish(process, run_dir)
    assert run.code == 0, run.output
    check_lines(run, steps=60, batch=8)
    assert [incident["dead_replicas"] for incident in run.incidents] == [[1]]


def test_one_that_is_stopped_on_its_way_out_does_not_keep_the_job(tmp_path: Path) -> None:
    """After the closing agreement nobody waits for it any more, but the launcher does."""
    script = """
        import os, signal, recover
        from recover.world import ending
        ending.on_success(lambda: world.rank == 1 and os.kill(os.getpid(), signal.SIGSTOP))  # after the world's own
        world = recover.init()
    """
    job = Job(tmp_path, script, "-n", "3", "--hang-limit", "1")
    assert job.finish() == 0, job.stderr
    assert "killed rank 1: its process has not run for" in job.stderr
    assert "done on ranks 0, 2" in job.stderr
    assert job.leftovers() == []


def _wakes(pid: int) -> bool:
    """Whether there is still somebody to go on."""
    try:
        os.kill(pid, signal.SIGCONT)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_a_pause_evicts_nobody_by_default_and_a_straggler_is_named_everywhere(tmp_path: Path) -> None:
    words = [*small_world(tmp_path), "replicas=3", "accum=2", "steps=13", "microbatch_size=64"]
    run = train(tmp_path / "run", *words, kills=["3:2:forward=slow:4", "6:1:in-reduce=pause:1"])
    assert run.code == 0, run.output
    check_lines(run, steps=13, batch=6)
    assert (run.incidents, run.summary["failures"]) == ([], 0)
    assert run.steps[5]["seconds"] > 0.9
    assert median(line["seconds"] for line in run.steps[3:]) < 0.6  # steps of about 0.2 s
    named = [line["stragglers"] for line in run.steps if "stragglers" in line]
    assert set(named[-1]) == {"2"}, named
    assert 2.5 < named[-1]["2"] < 6
    assert "replica 2 takes" in run.output
    assert "replica 2 takes" in (run.run_dir / "ranks" / "0.log").read_text()
    page = build([run.run_dir], tmp_path / "report").read_text()
    assert "Replica 2 took up to" in page
