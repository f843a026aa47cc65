"""The Open MPI fabric of one rank, over a fake MPI whose other ranks do what the test says.

Launches in tests/processes test it with real Open MPI.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from recover.world.fabrics import openmpi
from recover.world.fabrics.base import FabricError, NotAdmittedError
from recover.world.fabrics.openmpi import NotFaultTolerantError, OpenMPIFabric, start_mpi

ENDLESS = 100_000  # calls; a loop that makes more of them would never end


class MPIError(Exception):
    """The exception of mpi4py, for any error of Open MPI."""


class Group:
    """A group of failed ranks, numbered in this group; `members` are their ranks in the world."""

    def __init__(self, members: list[int], comm: Comm) -> None:
        self.members, self._comm = list(members), comm
        comm.groups += 1

    def Get_size(self) -> int:
        return len(self.members)

    @staticmethod
    def Translate_ranks(group: Group, numbers: list[int], world: Group) -> list[int]:
        return [world.members.index(group.members[number]) for number in numbers]

    def Free(self) -> None:
        self._comm.groups -= 1


class Request:
    """A request that ends when the test says so; `outcome` is an error then, or None."""

    def __init__(self) -> None:
        self.ended, self.outcome = False, None

    def Test(self) -> bool:
        if self.outcome is not None:
            raise self.outcome
        return self.ended


class Comm:
    """A communicator. `dead`: ranks in the order of their deaths. Notices of them arrive with the next call that
    drives progress."""

    def __init__(self, size: int) -> None:
        self.size, self.groups = size, 0
        self.dead: list[int] = []
        self.noticed: list[int] = []
        self.acknowledged: list[int] = []
        self.most_to_acknowledge = size
        self.error_handlers: list[object] = []
        self.agreement: Callable[[int], int] = lambda word: word
        self.requests: list[Request] = []
        self.mail: dict[tuple[int, int], list[bytes]] = {}

    def Set_errhandler(self, handler: object) -> None:
        self.error_handlers.append(handler)

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return self.size

    def Get_group(self) -> Group:
        return Group(list(range(self.size)), self)

    def Iprobe(self) -> None:
        self.noticed = list(self.dead)

    def Get_failed(self) -> Group:
        return Group(self.noticed, self)

    def Ack_failed(self, count: int) -> int:
        self.acknowledged.append(min(count, self.most_to_acknowledge))
        return self.acknowledged[-1]

    def Agree(self, word: int) -> int:
        return self.agreement(word)

    def Isend(self, buffer: list[Any], to: int, tag: int) -> Request:
        if to in self.dead:
            raise MPIError("process failed")
        self.requests.append(Request())
        return self.requests[-1]

    def Improbe(self, source: int, tag: int, status: SimpleNamespace) -> SimpleNamespace | None:
        if source in self.dead:
            raise MPIError("revoked")
        letters = self.mail.get((source, tag))
        if not letters:
            return None
        letter = letters.pop(0)
        status.Get_count = lambda kind: len(letter)

        def receive(buffer: list[Any]) -> Request:
            buffer[0][:] = letter
            self.requests.append(Request())
            return self.requests[-1]

        return SimpleNamespace(Irecv=receive)


class Board:
    """The counters of ranks 0 to `here` - 1, which are on this host; others have none here."""

    def __init__(self, here: int) -> None:
        self._here, self._asked = here, 0
        self.counters: dict[int, int] = dict.fromkeys(range(here), 0)
        self.last_finished: dict[int, int] = dict.fromkeys(range(here), 0)
        self.killed: list[int] = []
        self.while_waiting: Callable[[int], None] = lambda asked: None

    def is_here(self, rank: int) -> bool:
        return rank < self._here

    def enter(self, rank: int, number: int) -> None:
        self.counters[rank] = number

    def finish(self, rank: int, number: int) -> None:
        self.last_finished[rank] = number

    def entered(self, rank: int) -> int:
        self._count()
        return self.counters[rank]

    def finished(self, rank: int) -> int:
        self._count()
        return self.last_finished[rank]

    def heartbeats(self) -> dict[int, int]:
        return dict.fromkeys(range(self._here), 7)

    def kill(self, rank: int) -> None:
        self.killed.append(rank)

    def _count(self) -> None:
        self._asked += 1
        assert self._asked < ENDLESS, "the fabric waits for ever"
        self.while_waiting(self._asked)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that advances while the fabric sleeps."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    clock.sleep = sleep
    monkeypatch.setattr(openmpi, "time", clock)
    return clock


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Comm:
    comm = Comm(5)
    fake = SimpleNamespace(
        COMM_WORLD=comm,
        COMM_SELF=comm,
        ERRORS_RETURN="errors are returned",
        GROUP_EMPTY=None,
        BYTE="byte",
        Group=Group,
        Exception=MPIError,
        Status=SimpleNamespace,
    )
    monkeypatch.setattr(openmpi, "MPI", fake)
    return comm


def fabric_of(board: Board) -> OpenMPIFabric:
    return OpenMPIFabric(board)  # type: ignore[arg-type]


@pytest.fixture
def board() -> Board:
    return Board(here=1)


@pytest.fixture
def fabric(comm: Comm, board: Board) -> OpenMPIFabric:
    return fabric_of(board)


def test_open_mpi_deaths_are_detected_by_polling_without_leaked_groups(
    fabric: OpenMPIFabric, comm: Comm
) -> None:
    """Open MPI delivers notices only inside of its calls: the query for failed ranks must drive progress."""
    before = comm.groups
    assert fabric.failed() == frozenset()
    comm.dead = [3, 1]
    assert fabric.failed() == {1, 3}
    comm.dead += [4]
    assert fabric.failed() == {1, 3, 4}
    assert comm.groups == before, "groups of failed ranks are not freed"
    assert comm.error_handlers == ["errors are returned"] * 2, "the first death would abort this rank"


@pytest.mark.guarantee(
    "Membership",
    "The Open MPI fabric acknowledges deaths in order, fails agreements on any error, waits for no dead "
    "rank and keeps buffers until transfers end.",
)
def test_open_mpi_deaths_are_acknowledged_in_order_up_to_the_first_unknown(
    fabric: OpenMPIFabric, comm: Comm
) -> None:
    """MPI acknowledges a number of notices, the first ones. A death that was not looked at must still fail
    agreements."""
    comm.dead = [3, 1, 4]
    assert fabric.acknowledge(only=frozenset({1, 4})) == frozenset()
    assert comm.acknowledged == []
    assert fabric.acknowledge(only=frozenset({3, 4})) == {3}
    assert fabric.acknowledge(only=frozenset({1, 3})) == {1, 3}
    assert fabric.acknowledge(only=frozenset({3})) == {1, 3}, "an acknowledgement is never taken back"
    assert fabric.acknowledge() == {1, 3, 4}
    assert comm.acknowledged == [1, 2, 3]


def test_acknowledged_deaths_are_those_open_mpi_reports(fabric: OpenMPIFabric, comm: Comm) -> None:
    comm.dead, comm.most_to_acknowledge = [3, 1], 1
    assert fabric.acknowledge() == {3}
    comm.most_to_acknowledge = 2
    assert fabric.acknowledge() == {1, 3}


@pytest.mark.guarantee(
    "Membership",
    "The Open MPI fabric acknowledges deaths in order, fails agreements on any error, waits for no dead "
    "rank and keeps buffers until transfers end.",
)
def test_agreement_fails_on_any_error_and_ends_its_watchdog_entry(
    fabric: OpenMPIFabric, comm: Comm, board: Board
) -> None:
    """The watchdog sees a rank as waiting in an agreement while it waits, and not afterwards."""
    seen: list[tuple[int | None, int]] = []

    def agreement(word: int) -> int:
        seen.append((fabric.waiting_in, board.counters[0]))
        if len(seen) == 2:
            raise MPIError("other")
        return word & 0b101

    comm.agreement = agreement
    for number, agreed in enumerate([0b100, None, 0b100], 1):
        assert fabric.agree(0b110) == agreed
        assert fabric.agreements == board.last_finished[0] == number
        assert fabric.waiting_in is None
    assert seen == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.guarantee(
    "Membership",
    "The Open MPI fabric acknowledges deaths in order, fails agreements on any error, waits for no dead "
    "rank and keeps buffers until transfers end.",
)
def test_early_rank_sleeps_until_the_ranks_of_its_host_arrive(comm: Comm) -> None:
    """Rank 1 comes late, rank 2 is dead, rank 3 dies while rank 0 waits for it, rank 4 is on another host."""
    board = Board(here=4)
    fabric = fabric_of(board)
    comm.dead = [2]

    def while_waiting(asked: int) -> None:
        if asked == 100:
            comm.dead = [2, 3]
        if asked == 200:
            board.counters[1] = 1

    board.while_waiting = while_waiting
    comm.agreement = lambda word: board.counters[1]
    assert fabric.agree(0) == 1, "Open MPI spins in an agreement, and takes the core from a rank that is late"


def test_exiting_rank_waits_a_limited_time_for_others_to_hold_the_result(
    comm: Comm, clock: SimpleNamespace
) -> None:
    board = Board(here=3)
    fabric = fabric_of(board)
    comm.dead = [2]
    board.counters[1] = 1
    fabric.agree(1)

    def while_waiting(asked: int) -> None:
        if clock.now > 1.0:
            board.last_finished[1] = 1

    board.while_waiting = while_waiting
    fabric.linger(3.0)
    assert 1.0 < clock.now < 1.1, "another rank had no result yet"
    fabric.linger(3.0)
    assert clock.now < 1.1
    board.while_waiting, board.last_finished[1] = lambda asked: None, 0
    fabric.linger(3.0)
    assert 4.0 < clock.now < 4.2, "a rank that hangs must not keep this one"


def test_fabric_of_open_mpi_reads_the_heartbeats_of_its_board(fabric: OpenMPIFabric) -> None:
    assert fabric.heartbeats() == {0: 7}


def test_fenced_rank_is_killed(fabric: OpenMPIFabric, board: Board) -> None:
    fabric.fence(3)
    assert board.killed == [3]


@pytest.mark.guarantee(
    "Membership",
    "The Open MPI fabric acknowledges deaths in order, fails agreements on any error, waits for no dead "
    "rank and keeps buffers until transfers end.",
)
def test_transfer_buffers_are_kept_until_the_transfer_ends(fabric: OpenMPIFabric, comm: Comm) -> None:
    """MPI may read or write the buffers later, also if the caller no longer waits."""
    comm.mail[1, 7] = [b"letter"]
    first, second = fabric.send(b"row", 1, 7), fabric.receive(1, 7)
    assert not first.done()
    assert not second.done()
    kept = [weakref.ref(first), weakref.ref(second)]
    del first, second
    gc.collect()
    assert all(each() is not None for each in kept), "a buffer was freed while MPI may use it"
    fabric.receive(2, 7)
    gc.collect()
    assert all(each() is not None for each in kept), "a buffer was freed while MPI may use it"
    for request in comm.requests:
        request.ended = True
    for each in kept:
        transfer = each()
        assert transfer is not None
        assert transfer.done()
        del transfer
    fabric.receive(2, 7)
    gc.collect()
    assert [each() for each in kept] == [None, None], "buffers of transfers that have ended pile up"


def test_receive_takes_one_message_of_any_length(fabric: OpenMPIFabric, comm: Comm) -> None:
    comm.mail[1, 7] = [b"the first", b"", b"the third one"]
    for expected in (b"the first", b"", b"the third one"):
        transfer = fabric.receive_as_all(1, 7)
        assert not transfer.done(), "it has been matched, and is still under way"
        assert not transfer.done()
        comm.requests[-1].ended = True
        assert transfer.done()
        assert transfer.data == expected
    none = fabric.receive(1, 7)
    assert not none.done()
    assert none.data == b""


def test_transfers_with_dead_ranks_fail_at_once(fabric: OpenMPIFabric, comm: Comm) -> None:
    """The census ends at once; otherwise it would wait for its time limit."""
    comm.mail[1, 7] = [b"letter"]
    sent, matched, expected = fabric.send(b"row", 1, 7), fabric.receive(1, 7), fabric.receive(1, 8)
    assert not sent.done()
    assert not matched.done()
    comm.dead = [1]
    for request in comm.requests:
        request.outcome = MPIError("process failed")
    for transfer, what in (
        (sent, "send"),
        (matched, "receive from rank 1"),
        (expected, "receive from rank 1"),
    ):
        with pytest.raises(FabricError, match=what):
            transfer.done()
    with pytest.raises(FabricError, match="send to rank 1"):
        fabric.send(b"row", 1, 9)


def test_message_to_all_is_sent_to_each_rank(fabric: OpenMPIFabric, comm: Comm) -> None:
    assert len(fabric.send_to_all(b"table", [1, 3, 4], 9)) == len(comm.requests) == 3


def test_join_is_refused_on_open_mpi(fabric: OpenMPIFabric) -> None:
    assert fabric.participants == frozenset(range(5))
    assert fabric.asking() == frozenset()
    with pytest.raises(NotAdmittedError, match="fabric: etcd"):
        fabric.ask()


@pytest.mark.guarantee("Membership", "An MPI library without fault tolerance or thread support is refused.")
@pytest.mark.parametrize(
    ("version", "enabled", "before", "said"),
    [
        ("Open MPI v5.0.8, package: any\nmore", True, None, ""),
        ("Open MPI v5.0.8, package: any\nmore", True, 3, ""),
        ("Open MPI v4.1.6, package: any", True, None, "Open MPI v4.1.6.*no ULFM.*pip install"),
        ("MPICH Version: 5.0.0", True, None, "MPICH.*no ULFM"),
        ("Open MPI v5.0.8", False, None, "without fault tolerance.*--with-ft ulfm"),
        ("Open MPI v5.0.8", True, 1, "grants thread level 1.*before anything else initialises MPI"),
    ],
)
def test_mpi_without_fault_tolerance_or_threads_is_refused(
    comm: Comm, monkeypatch: pytest.MonkeyPatch, version: str, enabled: bool, before: int | None, said: str
) -> None:
    """`before`: the thread level with which something else has initialised MPI."""
    levels = [] if before is None else [before]
    for name, value in {
        "THREAD_MULTIPLE": 3,
        "Is_initialized": lambda: bool(levels),
        "Init_thread": levels.append,
        "Query_thread": lambda: levels[-1],
        "Get_library_version": lambda: version,
    }.items():
        setattr(openmpi.MPI, name, value)
    monkeypatch.setattr(openmpi, "fault_tolerance_enabled", lambda: enabled)
    if said:
        with pytest.raises(NotFaultTolerantError, match=said):
            start_mpi()
    else:
        assert start_mpi() == 5
    assert len(levels) == 1, "MPI is initialised once"
