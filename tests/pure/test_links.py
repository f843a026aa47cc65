"""Broken links: a reduction is aborted only when all members wait and nothing travels, never for a slow rank."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from patience import wait_until

from recover.job.grid import Grid
from recover.job.sockets import detect_connection_loss
from recover.job.spec import LINK_TIMEOUT, JobSpec, read_link_timeout
from recover.launch.preflight import Refusal, check_link_timeout
from recover.world import cross_group as cross_group
from recover.world.carriers import gloo
from recover.world.carriers.base import Ready
from recover.world.carriers.contract import UnreachedError
from recover.world.carriers.gloo_sockets import bytes_carried, is_connected, open_sockets, unreached
from recover.world.carriers.host_memory import StagingByDevice
from recover.world.carriers.worker import Work, Worker
from recover.world.census import ARRIVAL, Row, broken_links
from recover.world.fabrics.base import WorldLostError
from recover.world.failing_members import FAILURES
from recover.world.links import IDLE, Links, LinkWatchdog, Shown
from recover.world.liveness import other_hosts
from recover.world.liveness.board import WAITS, Board
from recover.world.membership import Membership, NoCarrierError

LOOK = 0.25
LIMIT = 10.0


def watch(watchdog: LinkWatchdog, seconds: float, start: float, **member: Any) -> float | None:
    """The time after which the watchdog reports that a group of three stands still, of which one member shows these
    values; None if it never does."""
    now = start
    while now < start + seconds:
        now += LOOK
        beats = int(now * 10)
        usual = {"heartbeat": beats, "waits_in": 4, "carried": 7}
        shown = {name: value(now) if callable(value) else value for name, value in member.items()}
        third = None if shown.get("unknown") else Shown(**usual | shown)
        if watchdog.look(4, {0: Shown(**usual), 1: Shown(**usual), 2: third}, now):
            return now - start
    return None


def test_stalled_group_is_aborted_after_the_limit() -> None:
    found = watch(LinkWatchdog(LIMIT), 3 * LIMIT, 100.0)
    assert found is not None
    assert LIMIT < found <= LIMIT + 3 * LOOK


@pytest.mark.parametrize(
    "member",
    [
        pytest.param({"waits_in": 0}, id="one computes"),
        pytest.param({"waits_in": 3}, id="one waits in another epoch"),
        pytest.param({"unknown": True}, id="nothing is known of one"),
        pytest.param({"heartbeat": 1}, id="one shows no life"),
        pytest.param({"carried": lambda now: int(now)}, id="bytes travel at one"),
        pytest.param({"waits_in": lambda now: 4 if now % LIMIT > 1 else 0}, id="one is busy now and then"),
    ],
)
def test_link_timeout_counts_only_while_all_wait_and_nothing_travels(member: dict[str, Any]) -> None:
    assert watch(LinkWatchdog(LIMIT), 10 * LIMIT, 100.0, **member) is None


def test_machine_that_slept_aborts_nothing() -> None:
    watchdog = LinkWatchdog(LIMIT)
    assert watch(watchdog, 0.9 * LIMIT, 100.0) is None
    assert watch(watchdog, 0.9 * LIMIT, 100.0 + 100 * LIMIT) is None


class Group:
    """Ranks that compute for any times and reduce in the same order, as each shows itself to the others."""

    def __init__(self, computes: list[list[float]], wire: float, cut: int | None) -> None:
        self._computes, self._wire, self._cut = computes, wire, cut
        self.posted: list[list[float]] = [[] for _ in computes]
        self.ended: list[float] = []
        now = [0.0] * len(computes)
        for operation in range(len(computes[0])):
            for rank, times in enumerate(computes):
                now[rank] += times[operation]
                self.posted[rank].append(now[rank])
            if operation == cut:
                break
            self.ended.append(max(now) + wire)
            now = [self.ended[-1]] * len(computes)

    def shown(self, rank: int, when: float) -> Shown:
        ended = sum(end <= when for end in self.ended)
        at_wire = any(
            post <= when and (operation >= len(self.ended) or when < self.ended[operation])
            for operation, post in enumerate(self.posted[rank])
        )
        return Shown(int(when * 10), 4 if at_wire else 0, ended)

    def found(self, rank: int, lag: float) -> float | None:
        """The time at which this rank aborts the group, if its view of the others lags by `lag` seconds."""
        watchdog, now = LinkWatchdog(LIMIT), 0.0
        end = max(posted[-1] for posted in self.posted) + 3 * LIMIT
        while now < end:
            now += LOOK
            members = {r: self.shown(r, now - (r != rank) * lag) for r in range(len(self.posted))}
            if members[rank].waits_in and watchdog.look(4, members, now):
                return now
        return None


seconds = st.sampled_from([0.0, 0.1, 1.0, LIMIT, 3 * LIMIT])
some = settings(max_examples=25, phases=[Phase.generate])  # counterexamples are small enough unshrunk


@pytest.mark.guarantee(
    "Several hosts",
    "All members abort a reduction in which all wait and nothing travels for the link timeout, and never "
    "for a slow rank.",
)
@some
@given(st.data(), st.integers(2, 4), st.integers(1, 3), st.floats(0, 1.5), st.floats(0, 2))
def test_slow_ranks_never_abort_their_reductions(
    data: st.DataObject, ranks: int, operations: int, wire: float, lag: float
) -> None:
    times = st.lists(seconds, min_size=operations, max_size=operations)
    computes = data.draw(st.lists(times, min_size=ranks, max_size=ranks))
    group = Group(computes, wire, cut=None)
    assert [group.found(rank, lag) for rank in range(ranks)] == [None] * ranks


@pytest.mark.guarantee(
    "Several hosts",
    "All members abort a reduction in which all wait and nothing travels for the link timeout, and never "
    "for a slow rank.",
)
@some
@given(st.data(), st.integers(2, 4), st.integers(1, 3), st.floats(0, 2))
def test_members_abort_a_reduction_over_a_cut_link_after_the_last_arrives(
    data: st.DataObject, ranks: int, operations: int, lag: float
) -> None:
    times = st.lists(seconds, min_size=operations, max_size=operations)
    computes = data.draw(st.lists(times, min_size=ranks, max_size=ranks))
    group = Group(computes, 0.1, cut=operations - 1)
    come = max(posted[-1] for posted in group.posted)
    for rank in range(ranks):
        found = group.found(rank, lag)
        assert found is not None
        assert come + LIMIT < found + lag + 2 * LOOK
        assert found < come + LIMIT + lag + 4 * LOOK


def test_rank_shows_that_it_waits_only_when_its_data_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device the host runs ahead: a posted operation may still have to wait for microbatches."""
    worker, board = Worker(), Board(tmp_path / "board", 2)
    arrived, through = [False], Work(lambda: None)
    event = SimpleNamespace(query=lambda: arrived[0])
    ready = Ready()
    ready.events.append(event)
    monkeypatch.setattr(cross_group, "Ready", lambda *data: ready)
    wire = SimpleNamespace(size=2, index=0, peers=(0, 1), ends_cleanly=True, carried=5)
    wire.follow = lambda ready: None
    wire.all_reduce = lambda *_: through.wait() and None
    cross = cross_group.CrossGroup(cast(Any, wire), worker)
    links = Links(0, board, worker, LIMIT)
    links.look(cross, 4, False, 0.0)
    assert board.row(0)[WAITS] == 0, "nothing was posted"
    work = cross.all_reduce(np.zeros(1))
    links.look(cross, 4, False, 10 * IDLE)
    assert board.row(0)[WAITS] == 0, "the device has not come to it"
    arrived[0] = True
    links.look(cross, 4, False, 11 * IDLE)
    assert board.row(0)[WAITS] == 4
    through.run()
    assert work.wait(30)
    links.look(cross, 4, True, 12 * IDLE)
    assert board.row(0)[WAITS] == 4, "it waits in an agreement"
    links.look(cross, 4, False, 13 * IDLE)
    assert board.row(0)[WAITS] == 0


def test_rows_of_other_hosts_show_whether_their_ranks_wait(tmp_path: Path) -> None:
    here, there = Board(tmp_path / "here", 2), Board(tmp_path / "there", 2)
    here.claim(0)
    there.claim(1)
    there.wait(1, 4, 77)
    other_hosts.leave(tmp_path, {int(rank): told for rank, told in other_hosts.told(there.living()).items()})
    links = Links(0, here, Worker(), LIMIT, lambda: other_hosts.rows(tmp_path))
    assert links._shown(0, 1.0) == Shown(0, 0, 0)
    assert links._shown(1, 1.0) == Shown(0, 4, 77)
    assert other_hosts.rows(tmp_path / "nowhere") == {}


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        near = socket.create_connection(door.getsockname())
        far, _ = door.accept()
        with near, far:
            yield near, far


def test_sockets_detect_a_lost_peer_when_sending_and_when_waiting() -> None:
    with connection() as (near, _):
        detect_connection_loss(near, 8.0)
        tcp = {name: near.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in TCP}
        assert tcp == TCP
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    one, other = socket.socketpair()
    with one, other:
        detect_connection_loss(one, 8.0)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0


TCP = {"TCP_USER_TIMEOUT": 8000, "TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


def test_travelling_bytes_are_seen_at_both_ends() -> None:
    with connection() as (near, far):
        before = bytes_carried(near), bytes_carried(far)
        assert (bytes_carried(near), bytes_carried(far)) == before
        near.sendall(b"x" * 1000)
        assert far.recv(1000, socket.MSG_WAITALL) == b"x" * 1000
        assert bytes_carried(far) == before[1] + 1000
        far.sendall(b"y")
        assert near.recv(1) == b"y"
        assert bytes_carried(near) == before[0] + 1001


def test_unreachable_members_are_named_and_one_with_a_closed_port_is_not() -> None:
    with ExitStack() as opened:
        open_door = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        closed = opened.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))
        deaf = opened.enter_context(deaf_listener())
        doors = {1: open_door.getsockname(), 2: closed.getsockname(), 3: deaf}
        found = unreached(doors, 0.2)
    assert found == {3: f"127.0.0.1:{doors[3][1]} (timed out)"}


@contextmanager
def deaf_listener() -> Iterator[tuple[str, int]]:
    """The address of a listener that never answers, as over a link that is cut."""
    with ExitStack() as opened:
        deaf = opened.enter_context(socket.socket())
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(3):  # these are never accepted, so that the kernel drops all further connections
            caller = opened.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(deaf.getsockname())
        yield deaf.getsockname()


@pytest.mark.guarantee(
    "Several hosts",
    "Hosts that cannot reach each other, while etcd is reachable, cost the fewest replicas, and the others go on.",
)
def test_member_that_does_not_reach_another_lets_the_rest_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third member, connected to both ends of a broken link, would wait for them until its own limit."""
    monkeypatch.setattr(gloo, "PROBE", 0.0)
    monkeypatch.setattr(gloo, "CALL", 0.2)
    carrier = gloo.GlooCarrier(0, Grid.of(3, 1), Worker(), (0, 1, 2), StagingByDevice(), "127.0.0.1")
    try:
        port, nonce, words, address = json.loads(carrier.offer())
        monkeypatch.setattr(carrier._meeting, "open", lambda words: None)  # gloo waits for its peers
        with (
            deaf_listener() as cut,
            socket.create_server(("127.0.0.1", 0)) as third,
            socket.create_connection((address, port)) as connection,
        ):
            ours = connection.getsockname()
            assert wait_until(lambda: ours in connected_to()), "gloo has not taken the connection"
            told = {0: (address, port), 1: cut, 2: third.getsockname()}
            offers = {rank: json.dumps([at[1], nonce, words, at[0]]).encode() for rank, at in told.items()}
            with pytest.raises(UnreachedError, match="no answer from rank 1 at ") as found:
                carrier.connect(offers, lambda ok: ok, lambda: False)
            assert found.value.ranks == (1,)
            assert ours not in connected_to(), "the third member goes on waiting"
    finally:
        carrier.free()


def connected_to() -> set[Any]:
    """The peer addresses of sockets of this process that neither end has closed."""
    found = set()
    for descriptor in open_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if is_connected(one):
                found.add(one.getpeername())
    return found


def membership(ranks: int, replica_size: int = 1) -> Membership[Any]:
    fabric = SimpleNamespace(rank=0, linger=lambda seconds: None)
    return Membership(cast(Any, fabric), Grid.of(ranks, replica_size), cast(Any, None), lambda *place: None)


def rows(ranks: int, *pairs: tuple[int, int], both: bool = True) -> dict[int, Row]:
    """The rows of a repair in which these pairs did not reach each other again and again."""
    unreached: dict[int, set[int]] = {rank: set() for rank in range(ranks)}
    for one, other in pairs:
        unreached[one].add(other)
        if both:
            unreached[other].add(one)
    return {
        rank: Row(
            b"",
            b"",
            built=FAILURES * bool(others),
            waited=FAILURES * (not others),
            epoch=3,
            trouble="no answer" * bool(others),
            unreached=tuple(sorted(others)),
        )
        for rank, others in unreached.items()
    }


@pytest.mark.guarantee(
    "Several hosts",
    "One of two hosts that cannot reach each other is evicted, or the run ends with its state saved and the "
    "hosts named.",
)
@pytest.mark.parametrize("both", [True, False])
def test_replica_at_the_end_of_all_broken_links_is_evicted(both: bool) -> None:
    def evicted(size: int, *links: tuple[int, int], replica_size: int = 1) -> frozenset[int]:
        return (
            membership(size, replica_size=replica_size)._failing_members(rows(size, *links, both=both)).ranks
        )

    assert evicted(3, (0, 1)) == {1}
    assert evicted(9, (0, 1)) == {1}
    assert evicted(4, (0, 2), (0, 3)) == {0}
    assert evicted(2, (0, 1)) == {1}
    # All ranks of a replica are evicted together.
    assert evicted(6, (0, 4), (1, 5), replica_size=2) == {4, 5}


@pytest.mark.guarantee(
    "Several hosts",
    "Hosts that cannot reach each other, while etcd is reachable, cost the fewest replicas, and the others go on.",
)
def test_links_broken_between_many_cost_the_fewest_replicas_by_name() -> None:
    """Tried with two replicas on each of two hosts, and with a ring of five, of which three are evicted."""
    found = membership(6)._failing_members(rows(6, (0, 2), (0, 3), (1, 2), (1, 3)))
    assert found.ranks == {2, 3}
    assert found.reasons[2] == "its link is broken to ranks 0, 1; the others reach each other without it"
    ring = [(number, (number + 1) % 5) for number in range(5)]
    assert membership(5)._failing_members(rows(5, *ring)).ranks == {1, 3, 4}


@pytest.mark.parametrize("joining", [{"epoch": 0}, {"record": ARRIVAL}], ids=["new", "in instalments"])
def test_joining_replica_behind_a_broken_link_goes_before_members(joining: dict[str, Any]) -> None:
    """Joining replicas go although a member is an end of more of the links."""
    told = rows(5, (0, 3), (0, 4))
    for rank in (3, 4):
        told[rank] = replace(told[rank], **joining)
    assert membership(5)._failing_members(told).ranks == {3, 4}


def test_world_in_which_half_fail_for_unknown_reasons_ends_and_saves_its_state() -> None:
    failing = {rank: Row(b"", b"", built=FAILURES, trouble=f"why {rank}", epoch=4) for rank in range(4)}
    with pytest.raises(NoCarrierError, match="rank 2: why 2") as told:
        membership(4)._failing_members(failing)
    assert isinstance(told.value, WorldLostError), "so its state is saved"


@pytest.mark.parametrize("took", [0.0, 0.15, 0.7, 30.0])
def test_rounds_of_a_repair_begin_later_and_later_whatever_they_take_themselves(took: float) -> None:
    """A round over a broken link takes seconds by itself: no pause is added to it."""
    paused: list[float] = []
    fabric = SimpleNamespace(rank=0, now=lambda: 50.0 + took, pause=paused.append, failed=frozenset)
    repair = Membership(cast(Any, fabric), Grid.of(3, 1), cast(Any, None), lambda *place: None)
    for fruitless in (1, 2, 3, 4):
        repair._back_off((0, 1, 2), fruitless, {}, 50.0)
    assert paused == pytest.approx([goal - took for goal in (0.2, 1.0, 2.0, 2.0) if goal > took])


@given(st.binary(max_size=9), st.lists(st.integers(0, 99), max_size=4), st.integers(0, 9))
def test_census_row_survives_serialization(offer: bytes, unreached: list[int], rank: int) -> None:
    row = Row(offer, b"record", built=2, trouble="why", epoch=4, before=(1, 2), unreached=tuple(unreached))
    assert Row.from_bytes(row.to_bytes(rank)) == (rank, row)
    assert broken_links({rank: row}) <= {(rank, rank)}


@pytest.mark.parametrize("text", ["soon", "0", "-1", "1.9", "inf", "nan"])
def test_invalid_link_timeout_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"the link timeout is .*; give seconds, 2 or more"):
        read_link_timeout(text)
    monkeypatch.setenv("RECOVER_LINK_TIMEOUT", text)
    with pytest.raises(Refusal, match="RECOVER_LINK_TIMEOUT"):
        check_link_timeout(None, 1800)
    with pytest.raises(ValueError, match="link timeout"):
        JobSpec.from_environment({"RECOVER_LINK_TIMEOUT": text})


def test_link_timeout_is_read_from_option_variable_or_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECOVER_LINK_TIMEOUT", raising=False)
    assert check_link_timeout(None, timeout=30) == LINK_TIMEOUT, "a default is nobody's mistake"
    assert check_link_timeout(5, timeout=30) == 5
    monkeypatch.setenv("RECOVER_LINK_TIMEOUT", "7.5")
    assert check_link_timeout(None, timeout=30) == 7.5
    with pytest.raises(Refusal, match="lower the link timeout or raise the timeout"):
        check_link_timeout(60, timeout=60)
