"""Hung ranks: a stopped or stuck rank is fenced, a slow one is not, and a machine that has slept kills no rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recover.job.grid import Grid
from recover.job.spec import read_hang_limit
from recover.launch.preflight import Refusal, check_hang_limit
from recover.step.in_flight import MicrobatchesInFlight
from recover.step.loop.clock import HostClock
from recover.step.loop.stragglers import NOISE, WINDOW, Stragglers
from recover.world.liveness.board import ACTIVITY, Board, can_go_on, may_be_ended
from recover.world.liveness.signs import Sign
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
    """Another rank, as the board shows it."""

    def __init__(self, slot: int = 3) -> None:
        self.beats, self.done, self.late, self.stopped, self.slot = 1, 0, True, False, slot
        self.holds_state = True

    def sign(self) -> Sign:
        return Sign(
            self.beats,
            (self.done,),
            self.late,
            self.stopped,
            step=6,
            suspects=((self.slot, 40 + self.slot),),
            holds_state=self.holds_state,
        )

    def stop(self) -> Peer:
        self.stopped = True
        return self


def company(*peers: Peer, healthy: int = 4) -> dict[int, Peer]:
    """These ranks as ranks 1, 2, ..., among `healthy` ranks that wait as the watching one does."""
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
    """Watch for these seconds. Returns the ranks that were found to hang, each with the seconds until then, and the
    time afterwards. A fenced rank is dead.

    Stopped ranks do not tick; `ticks`: whether other late ranks do.
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


def test_stopped_process_is_fenced_after_the_limit_and_not_before() -> None:
    watchdog, peer = running(), Peer().stop()
    found, now = watch(watchdog, peer, STOPPED - 1, 100.0)
    assert found == {}
    peer.stopped = False
    found, now = watch(watchdog, peer, 1, now)
    assert found == {}
    found, _ = watch(watchdog, peer.stop(), STOPPED + 1, now)
    assert found == {1: STOPPED}


def test_stopped_processes_are_fenced_in_any_number_and_step() -> None:
    one, two, three = Peer().stop(), Peer().stop(), Peer().stop()
    assert watch(running(), company(one, healthy=1), STOPPED + 1, 0.0)[0] == {1: STOPPED}
    assert watch(running(), company(one, two, three, healthy=1), STOPPED + 1, 0.0)[0] == dict.fromkeys(
        (1, 2, 3), STOPPED
    )
    one.late = False  # between two steps, before the first, or exiting
    assert watch(HangWatchdog(Grid(64)), company(one), STOPPED + 1, 0.0)[0] == {1: STOPPED}


def test_held_lock_counts_as_a_long_microbatch_and_not_between_steps() -> None:
    """The heartbeat of a rank that holds Python's lock stands still, but the kernel does not report it as stopped."""
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


@pytest.mark.guarantee(
    "Faults, hangs and stragglers",
    "A rank that computes for long, is between steps or is awaited by no other is not suspected.",
)
def test_long_computation_is_stuck_only_after_many_steps_of_waiting() -> None:
    peer = Peer()
    assert watch(running(step=0.2), peer, STUCK + 2, 0.0)[0] == {1: STUCK}
    assert watch(running(step=20), peer, FACTOR * 20 + 2, 0.0)[0] == {1: FACTOR * 20}
    watchdog, now = running(step=0.2), 0.0
    for _ in range(4):  # the rank finishes a microbatch now and then
        found, now = watch(watchdog, peer, STUCK - 5, now)
        assert found == {}
        peer.done += 1


@pytest.mark.guarantee(
    "Faults, hangs and stragglers", "The hang limit follows typical steps and ignores the first one."
)
def test_hang_limit_follows_typical_steps() -> None:
    watchdog = HangWatchdog(Grid(64))
    watchdog.committed(900.0)  # the first step compiled
    assert watchdog.stuck_limit == STUCK
    for seconds in (20.0, 20.0, 700.0, 20.0):
        watchdog.committed(seconds)
    assert watchdog.stuck_limit == FACTOR * 20
    for _ in range(LAST_STEPS):  # the job has become faster
        watchdog.committed(1.0)
    assert watchdog.stuck_limit == STUCK


@pytest.mark.guarantee(
    "Faults, hangs and stragglers", "No rank is fenced while half of the replicas or more look stuck."
)
@pytest.mark.parametrize("replica_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("stuck", "healthy"), [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 1), (3, 4), (7, 1)]
)
def test_majority_is_never_fenced_for_a_minority(stuck: int, healthy: int, replica_size: int) -> None:
    """Replicas count, not ranks: of each stuck replica only the first rank, or all ranks, may look stuck."""
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
        ]  # the reports become rarer
        assert "rank 0 for 60 s in step 6, slot 3 (sample 43)" in said[0]


@pytest.mark.guarantee(
    "Faults, hangs and stragglers", "No rank is fenced while half of the replicas or more look stuck."
)
def test_stall_that_ends_for_one_rank_after_another_costs_no_rank() -> None:
    """Three of four ranks wait for a file system, each a little later than the one before, and go on in that order."""
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


def test_slot_that_cost_a_replica_gives_the_next_six_times_as_long() -> None:
    watchdog = running(blamed=lambda step: frozenset({(3, 43)} if step == 6 else ()))
    assert watch(watchdog, Peer(slot=4), STUCK + 1, 0.0)[0] == {1: STUCK}
    assert watch(watchdog, Peer(slot=3), 7 * STUCK, 1000.0)[0] == {1: 6 * STUCK}


def test_stopped_process_is_not_reported_as_running_with_equal_limits() -> None:
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


def test_rank_fenced_for_being_stopped_is_not_reported_as_stuck() -> None:
    """Between SIGKILL and its end a process no longer counts as stopped; its slot must not be blamed."""
    watchdog, peer = running(limit=2), Peer().stop()
    peers = company(peer)
    _, now = watch(watchdog, peers, 1.9, 0.0)
    peer.stopped = False
    found, _ = watch(watchdog, peers, 1.5, now, ticks=False)
    assert found == {}


def test_rank_that_waits_for_a_stopped_process_is_not_stuck() -> None:
    """A rank has stopped while it passed an agreement's result on; its healthy neighbour waits for it."""
    found, _ = watch(running(limit=5), company(Peer().stop(), Peer()), 8, 0.0)
    assert set(found) == {1}


@pytest.mark.guarantee(
    "Faults, hangs and stragglers", "No rank is fenced while half of the replicas or more look stuck."
)
@pytest.mark.parametrize(
    ("members", "stuck", "holds_state", "fenced"),
    [(2, 1, False, set()), (2, 1, True, {1}), (2, 2, False, {2}), (1, 0, False, set()), (1, 1, False, {1})],
)
def test_joining_replica_is_fenced_and_does_not_count_as_healthy(
    members: int, stuck: int, holds_state: bool, fenced: set[int]
) -> None:
    """The replica joins one or two members, of which one may be stuck."""
    peers = {rank: Peer() for rank in range(members + 1)}
    peers[members].holds_state = holds_state
    for rank, peer in peers.items():
        peer.late = rank == stuck
    watchdog = HangWatchdog(Grid(members))
    watchdog.committed(1.0)
    found, _ = watch(watchdog, peers, 3 * STUCK, 0.0)
    assert found.keys() == fenced


def test_joining_rank_without_the_state_cannot_go_on_alone(tmp_path: Path) -> None:
    """Such a rank votes, so that others find out if it hangs."""
    board = Board(tmp_path / "board", 2)
    board.claim(1)
    board.make_step(1)
    board.catch_up(1, 4, 5)
    rows = {1: (board.row(1), "S")}
    assert not can_go_on(rows, Grid(1))
    board.hold_state(1)
    assert can_go_on({1: (board.row(1), "S")}, Grid(1))


@pytest.mark.parametrize(
    ("states", "ended"),
    [
        ("SSTS", {0, 1, 2, 3}),
        ("TSST", set()),
        ("TSS-", {2}),
        ("T-S-", {0, 2}),
        ("----TS", {4, 5}),
        ("TS--TS", {4, 5}),
    ],
    ids=[
        "a replica can go on",
        "both replicas may only be stopped",
        "one is lost",
        "both are lost",
        "nobody has the state",
        "a joining replica beside the last one",
    ],
)
def test_last_whole_replica_with_the_state_is_not_ended_although_it_is_stopped(
    tmp_path: Path, states: str, ended: set[int]
) -> None:
    """Two replicas of two ranks, and a joining one. `states`, by rank: it runs (S), is stopped (T), or is dead (-)."""
    board = Board(tmp_path / "board", 6)
    rows = {rank: (board.row(rank), state) for rank, state in enumerate(states) if state != "-"}
    assert may_be_ended(rows, Grid(2, 2)) == ended


def test_dead_rank_needs_no_fence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(tmp_path / "board", 1)
    monkeypatch.setattr(board, "pid", lambda rank: 2**22 + 1)  # it was alive at the lookup
    board.kill(0)


@pytest.mark.guarantee(
    "Faults, hangs and stragglers",
    "A rank that computes for long, is between steps or is awaited by no other is not suspected.",
)
def test_suspicion_requires_a_waiting_rank_inside_a_later_step() -> None:
    peer = Peer()
    assert watch(running(), peer, 5 * STUCK, 0.0, waiting=False)[0] == {}
    assert watch(running(), Peer().stop(), 5 * STUCK, 0.0, waiting=False)[0] == {}
    assert watch(HangWatchdog(Grid(64)), peer, 5 * STUCK, 0.0)[0] == {}
    assert watch(HangWatchdog(Grid(64)), peer, 5 * STUCK, 0.0, ticks=False)[0] == {}
    peer.late = False  # the rank evaluates, or writes a checkpoint
    assert watch(running(), peer, 5 * STUCK, 0.0)[0] == {}


@pytest.mark.guarantee("Faults, hangs and stragglers", "A machine that slept as a whole fences no rank.")
def test_machine_that_slept_fences_no_rank() -> None:
    watchdog, peer = running(), Peer().stop()
    found, now = watch(watchdog, peer, STOPPED - 1, 0.0)
    found, now = watch(watchdog, peer, STOPPED - 1, now + 3600)  # this watcher was asleep, too
    assert found == {}


def test_rank_does_not_exit_while_a_silent_one_may_hold_the_agreement() -> None:
    watchdog, peers = running(), company(Peer())
    _, now = watch(watchdog, peers, 2.0, 0.0, ticks=False)
    assert watchdog.hushed == [1]
    watch(watchdog, peers, 0.2, now)
    assert watchdog.hushed == []


def test_repeated_microbatch_is_a_sign_of_life_but_no_progress(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 1)
    world = SimpleNamespace(board=board, rank=0)
    handed_out = MicrobatchesInFlight(world, None, None, HostClock())  # type: ignore[arg-type]

    def shown(*slots: int) -> tuple[bool, bool]:
        handed_out.pending = [(slot, 40 + slot) for slot in slots]
        before = board.accomplished(), board._table[0, ACTIVITY]
        handed_out.computed()
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


def test_forgotten_agreement_is_detected_after_seconds() -> None:
    def given_up_after(held: list[bool], gap: float = LOOK) -> int | None:
        watchdog = AgreementWatchdog()
        gone = (watchdog.forgotten(7, each, number * gap) for number, each in enumerate(held))
        return next((number for number, left in enumerate(gone) if left), None)

    long = int(FORGOTTEN_AFTER / LOOK)
    assert given_up_after([True] * 2 * long) == pytest.approx(long, abs=2)
    assert given_up_after([False] * 2 * long) is None
    assert (
        given_up_after([True] * (long - 2) + [False] + [True] * (long - 2)) is None
    )  # a silent rank explains the wait
    assert given_up_after([True] * 10, gap=2.0) is None  # this rank itself was asleep


@pytest.mark.parametrize("text", ["0.5", "-3", "soon", "inf", "nan"])
def test_invalid_hang_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give seconds, 1 or more"):
        read_hang_limit(text)


def test_hang_limit_longer_than_the_timeout_is_refused() -> None:
    with pytest.raises(Refusal, match="lower the hang limit or raise the timeout"):
        check_hang_limit(60, timeout=60)
    assert check_hang_limit(2.5, timeout=60) == 2.5


def test_straggler_is_named_with_its_factor_after_a_while() -> None:
    stragglers = Stragglers()
    for _ in range(WINDOW - 1):
        assert stragglers.committed({0: 0.1, 1: 0.1, 2: 0.35}) == {}
    assert stragglers.committed({0: 0.1, 1: 0.1, 2: 9.0}) == {2: 3.5}  # the median: one step is noise
    assert stragglers.committed({0: 0.1, 2: 0.35}) == {2: 3.5}
    assert stragglers.committed({2: 0.35}) == {}
    unrest = Stragglers()
    assert [unrest.committed({0: NOISE / 10, 1: NOISE / 2}) for _ in range(WINDOW)][-1] == {}
