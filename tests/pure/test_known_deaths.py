"""The pause between the notice of a death and the construction of a communicator of Open MPI."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from recover.job.grid import Grid
from recover.world.deaths import BETWEEN_LOOKS, RECENT
from recover.world.membership import Membership
from recover.world.watcher import Watcher

SETTLE = 0.06


class Clock:
    """A fabric whose time passes in pauses only. `deaths`: when this rank notices which death."""

    def __init__(self, notices: dict[float, int] | None = None) -> None:
        self.rank, self.participants = 0, frozenset(range(4))
        self.time, self.deaths = 0.0, list((notices or {}).items())
        self.lives_until: dict[int, float] = {}  # by rank of this host with a heartbeat
        self.lock, self.waiting_in = threading.RLock(), None

    def now(self) -> float:
        return self.time

    def pause(self, seconds: float) -> None:
        self.time += seconds

    def heartbeats(self) -> dict[int, int]:
        return {rank: int(min(self.time, end) / 0.005) for rank, end in self.lives_until.items()}

    def look_for_exits(self, now: float) -> None:
        pass

    def failed(self) -> frozenset[int]:
        return frozenset(rank for at, rank in self.deaths if at <= self.time)


def made(clock: Clock) -> Membership[Any]:
    """A membership after its first repair, whose carrier cannot stand a death while it is made."""
    carriers: Any = SimpleNamespace(settle=SETTLE)
    membership: Membership[Any] = Membership(clock, Grid(4), carriers, lambda *place: None)  # type: ignore[arg-type]
    membership.epoch = 1
    return membership


def watch(membership: Membership[Any], clock: Clock, seconds: float, every: float) -> None:
    """Look as the watcher of a rank does whose main thread is busy."""
    parts: Any = SimpleNamespace(fabric=clock, liveness=None, own=None, notes=None)
    hangs: Any = SimpleNamespace(hushed=[])
    watcher = Watcher(
        parts, Grid(4), hangs, membership.deaths, lambda dead: None, lambda: False, print, print
    )
    watcher._looked = float("inf")  # it looks only for deaths
    until = clock.time + seconds
    while clock.time < until:
        watcher.look(clock.time)
        clock.pause(every)


@pytest.mark.guarantee(
    "Membership",
    "After a notice of a death a communicator is made once 60 ms have passed without another one, or, if it was "
    "the only one, once all other ranks have shown that they live.",
)
@pytest.mark.parametrize(
    ("watched", "every", "waits"),
    [
        (0.0, 0.005, SETTLE),  # the repair begins with the notice
        (0.03, 0.005, SETTLE - 0.03),
        (0.5, 0.005, 0.0),  # the collectives were given up for so long: long settled
        (10.0, 1.0, SETTLE - 10 * BETWEEN_LOOKS),  # suspended again and again
        (3.0, 3.0, SETTLE - BETWEEN_LOOKS),  # suspended once
    ],
)
def test_repair_waits_for_what_is_left_of_the_quiet_time(watched: float, every: float, waits: float) -> None:
    clock = Clock({0.0: 3})
    membership = made(clock)
    watch(membership, clock, watched, every)
    began = clock.time
    membership._settle()
    assert clock.time - began == pytest.approx(max(0.0, waits), abs=0.006)


def test_notice_between_the_watch_and_the_repair_starts_the_quiet_time_again() -> None:
    clock = Clock({0.0: 3})
    membership = made(clock)
    watch(membership, clock, 0.5, 0.005)
    clock.deaths.append((clock.time, 2))
    began = clock.time
    membership._settle()
    assert clock.time - began == pytest.approx(SETTLE, abs=0.002)


def test_notices_in_the_quiet_time_start_it_again() -> None:
    clock = Clock({0.0: 3, 0.05: 2})
    membership, began = made(clock), clock.time
    membership._settle()
    assert clock.time - began == pytest.approx(0.05 + SETTLE, abs=0.002)


@pytest.mark.guarantee(
    "Membership",
    "After a notice of a death a communicator is made once 60 ms have passed without another one, or, if it was "
    "the only one, once all other ranks have shown that they live.",
)
@pytest.mark.parametrize(
    ("lives_until", "settles"),
    [
        ({1: 9.0, 2: 9.0}, True),
        ({1: 9.0, 2: 9.0, 3: 0.9}, True),  # the row of the dead rank
        ({1: 9.0, 2: 0.99}, False),  # died before the notice
        ({1: 9.0, 2: 1.001}, False),  # died just after the notice
        ({1: 9.0, 2: 1.009}, False),  # died while the operations were given up
        ({1: 9.0}, False),  # on another host
        ({}, False),
    ],
)
def test_repair_does_not_wait_once_all_other_ranks_have_beaten(
    lives_until: dict[int, float], settles: bool
) -> None:
    clock = Clock({1.0: 3})
    clock.lives_until = lives_until
    membership = made(clock)
    watch(membership, clock, 1.025, 0.005)  # 25 ms from the notice to the repair
    membership._settle()
    waited = clock.time - 1.0
    if settles:
        assert waited < 0.025 + RECENT + 0.006
    else:
        assert waited == pytest.approx(SETTLE, abs=0.006)


def test_beats_of_the_time_before_the_notice_show_nothing() -> None:
    """The heartbeats are compared with those at the notice, however often this rank had looked before."""
    clock = Clock({1.0: 3})
    clock.lives_until = {1: 9.0, 2: 0.998}
    membership = made(clock)
    for clock.time in (0.9, 0.992, 1.0):
        membership.deaths.look()
    membership._settle()
    assert clock.time - 1.0 == pytest.approx(SETTLE, abs=0.002)


def test_carrier_that_stands_deaths_is_made_at_once() -> None:
    clock = Clock({0.0: 3})
    membership = made(clock)
    membership._carriers.settle = 0.0
    membership._settle()
    assert clock.time == 0.0


def test_last_survivor_waits_for_nobody() -> None:
    clock = Clock({0.0: 1, 1.0: 2, 2.0: 3})
    membership = made(clock)
    watch(membership, clock, 2.001, 0.005)
    began = clock.time
    membership._settle()
    assert clock.time == began


@pytest.mark.parametrize(
    ("deaths", "waits"),
    [
        ([(1.0, 3), (1.0, 4)], True),  # both noticed at once
        ([(0.9, 3), (1.0, 4)], True),  # one shortly after the other
        ([(0.5, 3), (1.0, 4)], False),  # two single deaths
    ],
)
def test_heartbeats_do_not_end_the_pause_in_a_burst_of_deaths(
    deaths: list[tuple[float, int]], waits: bool
) -> None:
    clock = Clock()
    clock.participants, clock.lives_until, clock.deaths = frozenset(range(5)), {1: 9.0, 2: 9.0}, deaths
    membership = made(clock)
    for clock.time in sorted({0.0} | {at for at, _ in deaths}):
        membership.deaths.look()
    membership._settle()
    waited = clock.time - deaths[-1][0]
    assert (waited > RECENT + 0.006) == waits
