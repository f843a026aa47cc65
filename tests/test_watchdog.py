"""Hung ranks: a stopped or stuck one is fenced, a slow one is not, and no machine that has slept kills anybody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from launching import Job, wait_until
from test_train_runs import _rank as rank_pid
from training import check_lines, finish, small_world, start, train
from worlds import Outcome, run_world

from recover.job.grid import Grid
from recover.job.spec import read_hang_limit
from recover.launch.preflight import Refusal, check_hang_limit
from recover.liveness.board import ACTIVITY, PID, STARTED, Board, start_time
from recover.liveness.signs import Sign
from recover.report import build
from recover.step import poison
from recover.step.step import Step
from recover.step.stragglers import NOISE, WINDOW, Stragglers
from recover.world.notes import RunNotes, blamed
from recover.world.watchdog import (
    FACTOR,
    FORGOTTEN_AFTER,
    LAST_STEPS,
    STOPPED,
    STUCK,
    AgreementWatchdog,
    HangWatchdog,
)

LOOK = 0.05


class Peer:
    """One other rank, as the board shows it."""

    def __init__(self, slot: int = 3) -> None:
        self.beats, self.done, self.late, self.stopped, self.slot = 1, 0, True, False, slot

    def sign(self) -> Sign:
        return Sign(
            self.beats, (self.done,), self.late, self.stopped, step=6, suspects=((self.slot, 40 + self.slot),)
        )

    def stop(self) -> Peer:
        self.stopped = True
        return self


def company(*peers: Peer, healthy: int = 4) -> dict[int, Peer]:
    """These peers, as ranks 1, 2, ..., among so many who wait as the watching one does."""
    waiting = [Peer() for _ in range(healthy)]
    for one in waiting:
        one.late = False
    return dict(enumerate([waiting[0], *peers, *waiting[1:]]))


def watch(
    watchdog: HangWatchdog,
    peers: dict[int, Peer] | Peer,
    seconds: float,
    now: float,
    ticks: bool = True,
    waiting: bool = True,
) -> tuple[dict[int, float], float]:
    """Look for so long; who was found to hang, after how long, and the time afterwards. A fenced one is dead.

    Whoever is stopped does not tick; `ticks`: whether the other late ones do.
    """
    peers = company(peers) if isinstance(peers, Peer) else peers
    started, found = now, dict[int, float]()
    while now - started < seconds:
        now += LOOK
        for peer in peers.values():
            peer.beats += not peer.stopped and (ticks or not peer.late)
        signs = {rank: peer.sign() for rank, peer in peers.items() if rank not in found}
        for rank in watchdog.look(waiting, signs, now):
            found[rank] = pytest.approx(now - started, abs=0.2)
    return found, now


def running(
    limit: float | None = None, step: float = 0.2, replica_size: int = 1, **more: Any
) -> HangWatchdog:
    watchdog = HangWatchdog(Grid(64 // replica_size, replica_size), limit, **more)
    for _ in range(3):
        watchdog.committed(step)
    return watchdog


def test_a_process_that_is_stopped_is_fenced_after_the_limit_and_a_shorter_pause_costs_nothing() -> None:
    watchdog, peer = running(), Peer().stop()
    found, now = watch(watchdog, peer, STOPPED - 1, 100.0)
    assert found == {}
    peer.stopped = False
    found, now = watch(watchdog, peer, 1, now)
    assert found == {}
    found, _ = watch(watchdog, peer.stop(), STOPPED + 1, now)
    assert found == {1: STOPPED}


def test_stopped_processes_are_fenced_however_many_they_are_and_in_whatever_step() -> None:
    one, two, three = Peer().stop(), Peer().stop(), Peer().stop()
    assert watch(running(), company(one, healthy=1), STOPPED + 1, 0.0)[0] == {1: STOPPED}
    assert watch(running(), company(one, two, three, healthy=1), STOPPED + 1, 0.0)[0] == dict.fromkeys(
        (1, 2, 3), STOPPED
    )
    one.late = False  # between two steps, before the first, or on its way out
    assert watch(HangWatchdog(Grid(64)), company(one), STOPPED + 1, 0.0)[0] == {1: STOPPED}


def test_a_call_that_holds_pythons_lock_counts_as_a_long_microbatch_and_between_steps_as_nothing() -> None:
    """Its heartbeat stands still, but the kernel does not say that it was stopped."""
    silent = Peer()
    assert watch(running(), silent, STUCK + 1, 0.0, ticks=False)[0] == {1: STUCK}
    silent.late = False
    peers = {**company(), 4: silent}
    watchdog, now = running(), 0.0
    while now < 5 * STUCK:
        now += LOOK
        for rank in range(4):
            peers[rank].beats += 1
        assert watchdog.look(True, {rank: peer.sign() for rank, peer in peers.items()}, now) == {}


def test_a_rank_that_computes_for_long_is_not_stuck_until_all_have_waited_many_steps_for_it() -> None:
    peer = Peer()
    assert watch(running(step=0.2), peer, STUCK + 2, 0.0)[0] == {1: STUCK}
    assert watch(running(step=20), peer, FACTOR * 20 + 2, 0.0)[0] == {1: FACTOR * 20}
    watchdog, now = running(step=0.2), 0.0
    for _ in range(4):  # it finishes a microbatch now and then
        found, now = watch(watchdog, peer, STUCK - 5, now)
        assert found == {}
        peer.done += 1


def test_the_limit_follows_typical_steps_and_neither_the_first_nor_a_long_one() -> None:
    watchdog = HangWatchdog(Grid(64))
    watchdog.committed(900.0)  # it compiled
    assert watchdog.stuck_limit == STUCK
    for seconds in (20.0, 20.0, 700.0, 20.0):
        watchdog.committed(seconds)
    assert watchdog.stuck_limit == FACTOR * 20
    for _ in range(LAST_STEPS):  # the job has become faster
        watchdog.committed(1.0)
    assert watchdog.stuck_limit == STUCK


@pytest.mark.parametrize("replica_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("stuck", "healthy"), [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 1), (3, 4), (7, 1)]
)
def test_the_many_are_never_fenced_for_the_few(stuck: int, healthy: int, replica_size: int) -> None:
    """Replicas count, not ranks: of each stuck one only the first rank, or all of them, may look stuck."""
    for whole in (False, True):
        ranks = {}
        for replica in range(stuck + healthy):
            for shard in range(replica_size):
                peer = ranks[replica * replica_size + shard] = Peer()
                peer.late = replica < stuck and (whole or shard == 0)
        said: list[str] = []
        watchdog = running(replica_size=replica_size, report=said.append)
        found, _ = watch(watchdog, ranks, 3 * STUCK, 0.0)
        fenced = {rank for rank in found if rank < stuck * replica_size}
        if 2 * stuck < stuck + healthy:
            assert fenced == set(found) == {rank for rank, peer in ranks.items() if peer.late}
            continue
        assert found == {}
        assert [f"{stuck} of {stuck + healthy} replicas" in text for text in said] == [
            True,
            True,
        ]  # rarer and rarer
        assert "rank 0 for 60 s in step 6, slot 3 (sample 43)" in said[0]


def test_a_stall_that_ends_for_one_after_the_other_costs_nobody() -> None:
    """Three of four wait for a file system, each a little later than the one before, and so they go on."""
    stalled = [Peer(), Peer(), Peer()]
    peers = company(healthy=1)
    watchdog, now = running(), 0.0
    for number, peer in enumerate(stalled, start=1):
        peers[number] = peer
    for second in range(200):
        for number, peer in enumerate(stalled):
            peer.done += second <= number or second > 75 + 20 * number
        found, now = watch(watchdog, peers, 1, now)
        assert found == {}, second


def test_a_slot_that_has_cost_a_replica_gives_the_next_one_six_times_as_long() -> None:
    watchdog = running(blamed=lambda step: frozenset({(3, 43)} if step == 6 else ()))
    assert watch(watchdog, Peer(slot=4), STUCK + 1, 0.0)[0] == {1: STUCK}
    assert watch(watchdog, Peer(slot=3), 7 * STUCK, 1000.0)[0] == {1: 6 * STUCK}


def test_with_one_limit_for_both_a_stopped_process_is_not_said_to_run() -> None:
    watchdog, peer = running(limit=2), Peer()
    _, now = watch(watchdog, peer, 0.3, 0.0)  # busy with a microbatch, then stopped
    peers, hung = company(peer.stop()), {}
    for _ in range(50):
        now += LOOK
        for rank in (0, 2, 3, 4):
            peers[rank].beats += 1
        hung |= watchdog.look(True, {rank: one.sign() for rank, one in peers.items()}, now)
    assert set(hung) == {1}
    assert "has been stopped" in hung[1]


def test_one_that_dies_of_a_fence_for_being_stopped_is_not_taken_for_stuck_by_the_next_to_look() -> None:
    """Between SIGKILL and its end a process is no longer stopped; its slot must not be blamed."""
    watchdog, peer = running(limit=2), Peer().stop()
    peers = company(peer)
    _, now = watch(watchdog, peers, 1.9, 0.0)
    peer.stopped = False
    found, _ = watch(watchdog, peers, 1.5, now, ticks=False)
    assert found == {}


def test_who_waits_for_a_stopped_process_is_not_taken_for_stuck() -> None:
    """One has stopped in the middle of telling an agreement's result; its neighbour waits for it, healthy."""
    found, _ = watch(running(limit=5), company(Peer().stop(), Peer()), 8, 0.0)
    assert set(found) == {1}


def test_one_who_has_died_meanwhile_needs_no_fence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(tmp_path / "board", 1)
    monkeypatch.setattr(board, "pid", lambda rank: 2**22 + 1)  # it lived when it was looked up
    board.kill(0)


def test_nobody_is_suspected_by_one_who_does_not_wait_outside_of_a_step_or_before_the_first() -> None:
    peer = Peer()
    assert watch(running(), peer, 5 * STUCK, 0.0, waiting=False)[0] == {}
    assert watch(running(), Peer().stop(), 5 * STUCK, 0.0, waiting=False)[0] == {}
    assert watch(HangWatchdog(Grid(64)), peer, 5 * STUCK, 0.0)[0] == {}
    assert watch(HangWatchdog(Grid(64)), peer, 5 * STUCK, 0.0, ticks=False)[0] == {}
    peer.late = False  # it evaluates, or writes a checkpoint
    assert watch(running(), peer, 5 * STUCK, 0.0)[0] == {}


def test_a_machine_that_slept_as_a_whole_fences_nobody() -> None:
    watchdog, peer = running(), Peer().stop()
    found, now = watch(watchdog, peer, STOPPED - 1, 0.0)
    found, now = watch(watchdog, peer, STOPPED - 1, now + 3600)  # this watcher was asleep, too
    assert found == {}


def test_no_rank_gives_itself_up_while_a_silent_one_may_hold_the_agreement_up() -> None:
    watchdog, peers = running(), company(Peer())
    _, now = watch(watchdog, peers, 2.0, 0.0, ticks=False)
    assert watchdog.hushed == [1]
    watch(watchdog, peers, 0.2, now)
    assert watchdog.hushed == []


def test_the_board_shows_who_is_last_who_is_stopped_and_what_each_computes(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 4)
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
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
        assert wait_until(lambda: board.signs_of_life(0)[1].stopped, 5)
        signs = board.signs_of_life(0)
        assert {rank for rank, sign in signs.items() if sign.late} == {1, 2}  # 3 waits for them, as 0 does
        assert {rank for rank, sign in signs.items() if sign.stopped} == {1}
        assert [sign.suspects for sign in signs.values()] == [
            (),
            ((3, 43),),
            ((7, 47), (9, 49), (40, 80)),
            (),
        ]
        assert not any(sign.late for sign in board.signs_of_life(1).values())  # it has not come itself
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


def test_a_microbatch_that_is_run_again_is_a_sign_of_life_but_no_progress(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 1)
    step: Any = SimpleNamespace(_world=SimpleNamespace(board=board, rank=0), _ran=set())

    def shown(*slots: int) -> tuple[bool, bool]:
        step._pending = [(slot, 40 + slot) for slot in slots]
        before = board.accomplished(), board._table[0, ACTIVITY]
        Step._show_progress(step)
        return board.accomplished() != before[0], board._table[0, ACTIVITY] != before[1]

    assert [shown(3), shown(3), shown(2, 3), shown(2), shown(3)] == [
        (True, True),
        (False, True),
        (True, True),
        (False, True),
        (False, True),
    ]
    before = board.accomplished()
    for rite in (board.enter, board.finish, board.arrive):
        rite(0, 7)
    board.come_to_vote(0)
    assert board.accomplished() == before


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
    words = [*small_world(tmp_path), "replicas=5", "accum=2", "steps=45", "pace=0.02", "hang_limit=2"]
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
    check_lines(run, steps=45, batch=10)
    assert [incident["dead_replicas"] for incident in run.incidents] == [[0], [1], [3]]
    ends = [json.loads((run_dir / "ranks" / f"{rank}.end").read_text()) for rank in range(5)]
    assert [end["end"] for end in ends] == ["fenced", "fenced", "done", "fenced", "done"]
    assert "its process has been stopped for 2 s" in ends[1]["detail"]
    assert "it runs, but has done nothing for" in ends[3]["detail"]
    assert ends[3]["detail"] in run.output
    notes_left = [path.name for path in (run_dir / "ranks").glob("*.slot")]
    assert notes_left == ["3.slot"]  # what a stopped one was computing is not to blame


@pytest.mark.soak
def test_a_stopped_rank_is_fenced_within_the_documented_limit_by_default(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, *small_world(tmp_path), "replicas=4", "accum=2", "steps=60", "pace=0.1")
    steps = run_dir / "steps.jsonl"
    assert wait_until(lambda: steps.exists() and steps.read_text().count("\n") >= 5, 60)
    stopped, seen, at = rank_pid(process, 1), steps.read_text().count("\n"), time.monotonic()
    os.kill(stopped, signal.SIGSTOP)
    assert wait_until(lambda: steps.read_text().count("\n") > seen + 1, 60)
    assert STOPPED - 1 < time.monotonic() - at < STOPPED + 5
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
    assert "killed rank 1: its process has been stopped for" in job.stderr
    assert "done on ranks 0, 2" in job.stderr
    assert job.leftovers() == []


def stalls(tmp_path: Path, **more: float) -> tuple[Outcome, dict[int, str]]:
    """Five replicas and a limit of 1.5 s; all that holds them up takes longer. The outcome, and the ranks' logs."""
    options = {"hold": 2.5, "stall": 3, "sample": 3, **more}
    outcome = run_world("stalls.py", tmp_path / "run", 5, [options], hang_limit=1.5)
    logs = {rank: tmp_path / "run" / "ranks" / f"{rank}.log" for rank in range(5)}
    return outcome, {rank: log.read_text() if log.exists() else "" for rank, log in logs.items()}


def test_a_held_lock_and_a_stall_of_the_many_cost_nobody_and_a_slow_sample_costs_one(tmp_path: Path) -> None:
    outcome, logs = stalls(tmp_path)
    assert outcome.code == 0, outcome.output
    lost = [rank for rank, end in outcome.ends.items() if end != "done"]
    assert lost == [1], (
        outcome.output
    )  # it was given slot 3, which takes too long; the next one got more time for it
    assert "in step 7, slot 3 (sample 63), so rank" in outcome.output
    assert {tuple(entry["replicas"]) for entry in outcome.notes(0, "commit")[:6]} == {(0, 1, 2, 3, 4)}
    assert outcome.notes(0, "commit")[-1] == {"kind": "commit", "step": 10, "replicas": [0, 2, 3, 4]}
    assert "waiting for 4 of 5 replicas" in logs[0]
    assert "rank 4 for 2 s in step 5, slot 8 (sample 48)" in logs[0]
    assert list(notes_in(tmp_path / "run", 7)) == [(1, ((3, 63),))]


@pytest.mark.soak
def test_a_sample_that_nobody_gets_through_ends_the_run_after_two_replicas(tmp_path: Path) -> None:
    outcome, _ = stalls(tmp_path, last=1000)
    assert outcome.code == 1
    ends = [outcome.ends[rank] for rank in range(5)]
    assert sorted(ends) == ["fenced", "fenced", "fenced", "raised", "raised"], outcome.output
    assert "PoisonedSampleError: slot 3 of step 9 (sample 83) has cost replicas 2, " in outcome.output
    assert "it runs, but has done nothing for 9 s" in outcome.output


def notes_in(run_dir: Path, step: int) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    yield from ((note.rank, note.suspects) for note in RunNotes(str(run_dir), 0).read(step))


def test_a_slot_that_cost_two_replicas_ends_the_run_however_each_was_lost(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    notes, grid = RunNotes(str(tmp_path), 0), Grid(4, 2)
    notes.leave(6, [(2, 42), (3, 43)], "it has done nothing for 60 s", rank=2)
    notes.leave(6, [(2, 42), (3, 43)], "it has done nothing for 60 s", rank=3)  # of the same replica
    notes.leave(5, [(3, 33)], "it has done nothing for 60 s", rank=0)
    poison.check(notes, 6, grid)
    assert blamed(notes, 6) == {(2, 42), (3, 43)}
    notes.leave(6, [(3, 43)], "it raised: ValueError", rank=7)
    poison.check(notes, 5, grid)
    with pytest.raises(
        poison.PoisonedSampleError, match=r"slot 3 of step 6 \(sample 43\) has cost replicas 1, 3"
    ):
        poison.check(notes, 6, grid)


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
