"""The `nccl` carrier against a fake library with the same rules: an abort frees ranks that wait for a dead one.

The real library is tested on GPUs. These tests check the order of events: that results are complete when the work says
so, that no thread is inside the library while a group is aborted, that buffers are not reused before the device is
through with them.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from patience import PATIENCE, wait_until
from streams import LateDevice, LateStream, on_device

from recover.job.grid import Grid
from recover.world.carriers.base import Ready
from recover.world.carriers.contract import CarrierError, TookTooLongError
from recover.world.carriers.host_and_device import HostAndDevice, HostAndDeviceCarriers
from recover.world.carriers.nccl import NcclCarrier, NcclCarriers
from recover.world.carriers.nccl_library import MAX, SUM, Nccl
from recover.world.carriers.worker import Worker
from recover.world.cross_group import CrossGroup


class Groups:
    """State that all ranks of a group share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.joined: dict[bytes, dict[int, Rank]] = {}
        self.brought: dict[tuple[bytes, int], dict[int, torch.Tensor]] = {}
        self.mail: dict[tuple[bytes, int, int], list[torch.Tensor]] = {}


class Rank:
    """The library on one rank. Every call returns at once; its operation ends after it was asked for a few times."""

    def __init__(self, groups: Groups, streams: dict[int, LateStream]) -> None:
        self._groups, self._streams = groups, streams
        self._threads_inside = 0
        self.crowded = False  # two threads were inside at once
        self.aborted = False
        self.slow_look = 0.0
        self.slow_abort = 0.0
        self.memory_is_free = threading.Event()  # an abort ends the kernels, and goes on until then
        self.memory_is_free.set()
        self._looks = 0
        self._operation = 0
        self.enqueued = 0  # the last operation of which the carrier knows that it was enqueued

    def new_id(self) -> bytes:
        return b"%0128d" % time.monotonic_ns()

    def begin_group(self, address: bytes, size: int, index: int) -> int:
        with self._inside():
            self._address, self._size, self._index = address, size, index
            self.aborted = False
            with self._groups.lock:
                self._groups.joined.setdefault(address, {})[index] = self
            return 1

    def is_through(self, comm: int) -> bool:
        with self._inside():
            assert not self.aborted, "a communicator was used after its abort"
            self._looks += 1
            time.sleep(self.slow_look)
            if len(self._groups.joined[self._address]) < self._size or self._looks % 3:
                return False
            self.enqueued = self._operation
            return True

    def all_reduce(
        self, source: int, out: int, count: int, kind: str, operation: int, comm: int, stream: int
    ) -> None:
        def combine(brought: dict[int, torch.Tensor]) -> torch.Tensor:
            rows = torch.stack(list(brought.values()))
            return {SUM: rows.sum(0), MAX: rows.amax(0)}[operation]

        self._launch(_memory(source, count, kind), _memory(out, count, kind), stream, combine)

    def broadcast(self, root: int, data: int, count: int, kind: str, comm: int, stream: int) -> None:
        memory = _memory(data, count, kind)
        self._launch(memory, memory, stream, lambda brought: brought[root])

    def all_gather(self, source: int, out: int, count: int, kind: str, comm: int, stream: int) -> None:
        def in_order(brought: dict[int, torch.Tensor]) -> torch.Tensor:
            return torch.cat([brought[index] for index in sorted(brought)])

        room = _memory(out, count * self._size, kind)
        self._launch(_memory(source, count, kind), room, stream, in_order)

    def _launch(
        self,
        send: torch.Tensor,
        receive: torch.Tensor,
        stream: int,
        made_of: Callable[[dict[int, torch.Tensor]], torch.Tensor],
    ) -> None:
        with self._inside():
            self._operation += 1
            key, here = (self._address, self._operation), self._index

            def bring() -> bool:
                self._groups.brought.setdefault(key, {}).setdefault(here, send.clone())
                return True

            def kernel() -> bool:
                brought = self._groups.brought[key]
                if self.aborted:
                    receive.fill_(-7)  # half a result
                    return True
                if len(brought) < self._size:
                    return False
                receive.copy_(made_of(brought))
                return True

            self._streams[stream].launch(bring)
            self._streams[stream].launch(kernel)

    def exchange(self, out: Any, into: Any, kind: str, comm: int, stream: int) -> None:
        sent = [(peer, _memory(data, count, kind)) for peer, data, count in out]
        received = [(peer, _memory(data, count, kind)) for peer, data, count in into]
        mail, address, here = self._groups.mail, self._address, self._index

        def bring() -> bool:
            for peer, data in sent:
                mail.setdefault((address, here, peer), []).append(data.clone())
            return True

        def kernel() -> bool:
            if self.aborted:
                return True
            if not all(mail.get((address, peer, here)) for peer, _ in received):
                return False
            for peer, data in received:
                data.copy_(mail[address, peer, here].pop(0))
            return True

        with self._inside():
            self._streams[stream].launch(bring)
            self._streams[stream].launch(kernel)

    def abort(self, comm: int) -> None:
        with self._inside():
            time.sleep(self.slow_abort)
            self.aborted = True
            assert self.memory_is_free.wait(PATIENCE)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._threads_inside += 1
        self.crowded |= self._threads_inside > 1
        yield
        self._threads_inside -= 1


def _memory(address: int, count: int, kind: str) -> torch.Tensor:
    numbers: Any = {
        "float32": ctypes.c_float,
        "float64": ctypes.c_double,
        "int32": ctypes.c_int32,
        "int64": ctypes.c_int64,
    }[kind]
    whole = (numbers * count).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(whole))


def make_ranks(size: int, seed: int | None = None) -> tuple[list[Rank], list[NcclCarrier], list[CrossGroup]]:
    """Make the ranks of a group and connect them."""
    groups, ranks, carriers, crosses = Groups(), [], [], []
    peers = tuple(range(size))
    for number in peers:
        stream = LateDevice(seed).stream()
        rank, worker = Rank(groups, {stream.handle: stream}), Worker()
        ranks.append(rank)
        carriers.append(NcclCarrier(worker, peers, number, rank, stream, [], []))
        crosses.append(CrossGroup(carriers[-1], worker))
    offers = {number: carrier.offer() for number, carrier in enumerate(carriers)}
    builders = [
        threading.Thread(target=carrier.build, args=(offers, bool, lambda: False)) for carrier in carriers
    ]
    for each in builders:
        each.start()
    for each in builders:
        each.join(10)
    return ranks, carriers, crosses


@pytest.mark.guarantee(
    "Membership", "The vote waits for all sums queued on the device, not for the host's part alone."
)
def test_nccl_sums_are_complete_when_the_work_is_done() -> None:
    _, _, crosses = make_ranks(3)
    sources = [on_device(torch.full((100,), float(n + 1))) for n in range(3)]
    outs = [on_device(torch.zeros(100)) for _ in range(3)]
    rows = [np.full(4, n + 1.0) for n in range(3)]  # data of the host travel, too
    halves = [on_device(torch.full((8,), n + 1.0, dtype=torch.bfloat16)) for n in range(3)]
    works: list[Any] = []
    for cross, source, out, row, half in zip(crosses, sources, outs, rows, halves, strict=True):
        works += [cross.all_reduce(source, out), cross.all_reduce(row), cross.all_reduce(half)]
    assert all(work.wait(10) for work in works), [work.error for work in works]
    for n in range(3):
        assert outs[n].tolist() == [6.0] * 100
        assert sources[n].tolist() == [n + 1.0] * 100
        assert rows[n].tolist() == [6.0] * 4
        assert halves[n].tolist() == [6.0] * 8


def test_nccl_broadcast_and_all_gather_deliver_to_every_rank() -> None:
    _, _, crosses = make_ranks(3)
    state = [on_device(torch.full((7,), n + 1.0)) for n in range(3)]
    mine = [on_device(torch.full((2,), n, dtype=torch.int64)) for n in range(3)]
    rows = [on_device(torch.empty((3, 2), dtype=torch.int64)) for _ in range(3)]
    names = [np.array([n], np.int32) for n in range(3)]
    table = [np.empty((3, 1), np.int32) for _ in range(3)]
    works: list[Any] = []
    for n, cross in enumerate(crosses):
        works += [cross.broadcast(state[n], root=1), cross.all_gather(mine[n], rows[n])]
        works += [cross.all_gather(names[n], table[n]), cross.barrier()]
    assert all(work.wait(10) for work in works), [work.error for work in works]
    for n in range(3):
        assert state[n].tolist() == [2.0] * 7
        assert rows[n].tolist() == [[0, 0], [1, 1], [2, 2]]
        assert table[n].tolist() == [[0], [1], [2]]


def test_nccl_exchange_delivers_in_order_from_devices_and_hosts() -> None:
    """Two ranks send to a third, from a device and from the host, while the third sends nothing."""
    _, _, crosses = make_ranks(3)
    given = [on_device(torch.arange(5)), np.arange(10, 14)]
    later = [on_device(torch.arange(5) + 100), np.arange(10, 14) + 100]
    taken = [[on_device(torch.zeros(5, dtype=torch.int64)), np.zeros(4, np.int64)] for _ in range(2)]
    works = [cross.exchange({2: data}, {}) for cross, data in zip(crosses, given, strict=False)]
    works += [cross.exchange({2: data}, {}) for cross, data in zip(crosses, later, strict=False)]
    works += [crosses[2].exchange({}, dict(enumerate(rooms))) for rooms in taken]
    assert all(work.wait(10) for work in works), [work.error for work in works]
    for rooms, data in zip(taken, (given, later), strict=True):
        assert [room.tolist() for room in rooms] == [each.tolist() for each in data]


@pytest.mark.guarantee(
    "Membership",
    "No thread is inside NCCL while a group is aborted, and no aborted kernel writes to a released buffer.",
)
@pytest.mark.parametrize("slow_abort", [0.0, 0.2])
def test_nccl_abort_frees_ranks_that_wait_for_the_dead(
    slow_abort: float,
) -> None:
    ranks, _, crosses = make_ranks(3)
    locals_ = [on_device(torch.ones(10)) for _ in range(3)]
    works = [
        cross.all_reduce(local) for cross, local in zip(crosses[:2], locals_[:2], strict=True)
    ]  # the third rank is dead
    time.sleep(0.02)
    assert not any(work.done for work in works)
    for rank, cross in zip(ranks[:2], crosses[:2], strict=True):
        rank.slow_abort = slow_abort
        cross.abort_operations()
        later = cross.all_reduce(on_device(torch.ones(3)))
        assert later.refused
    for rank, cross, work, local in zip(ranks, crosses, works, locals_, strict=False):
        cross.drain()
        assert not rank.crowded
        assert work.done
        assert not work.ok
        assert rank.aborted  # the device is through with the buffers, whatever is in them now
        local.fill_(3.0)
        time.sleep(0.01)
        assert local.tolist() == [3.0] * 10, "the aborted kernel has written to a buffer that was given back"


@pytest.mark.guarantee(
    "Membership",
    "No thread is inside NCCL while a group is aborted, and no aborted kernel writes to a released buffer.",
)
def test_nccl_abort_waits_for_a_thread_inside_the_library() -> None:
    ranks, carriers, crosses = make_ranks(2)
    ranks[0].slow_look = 0.05
    local = on_device(torch.ones(10))
    work = crosses[0].all_reduce(local)
    assert work.started.wait(5)
    time.sleep(0.02)  # rank 0 is polling its operation now
    crosses[0].abort_operations()
    crosses[0].drain()
    assert not work.ok
    assert ranks[0].aborted
    assert not ranks[0].crowded
    local.fill_(3.0)
    carriers[0]._stream.record().synchronize()
    assert local.tolist() == [3.0] * 10, "the aborted kernel has written to a buffer that was given back"


@pytest.mark.guarantee(
    "Membership",
    "While NCCL frees the memory of an aborted group, the repair goes on; the next group is made afterwards.",
)
def test_nccl_repair_goes_on_while_the_memory_of_a_group_is_freed() -> None:
    ranks, carriers, crosses = make_ranks(3)
    rank, stream = ranks[0], carriers[0]._stream
    rank.memory_is_free.clear()
    works = [cross.all_reduce(on_device(torch.ones(10))) for cross in crosses[:2]]  # the third rank is dead
    assert wait_until(lambda: rank.enqueued == 2)  # after the trial reduction
    for cross in crosses[:2]:
        cross.abort_operations()
    crosses[0].drain()
    assert works[0].done
    assert not works[0].ok
    carriers_of_rank = NcclCarriers(SimpleNamespace(rank=0), Grid(3), Worker(), rank, stream)  # type: ignore[arg-type]
    carriers_of_rank._aborts = carriers[0]._aborts
    made: list[NcclCarrier] = []
    maker = threading.Thread(target=lambda: made.append(carriers_of_rank.make((0,))))
    maker.start()
    time.sleep(0.05)
    assert not made, "two threads would be inside NCCL at once"
    rank.memory_is_free.set()
    maker.join(10)
    made[0].build({0: made[0].offer()}, bool, lambda: False)
    assert not rank.crowded


def test_nccl_abort_that_does_not_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recover.world.carriers.nccl.ABORT_LIMIT", 0.05)
    ranks, carriers, _ = make_ranks(1)
    ranks[0].memory_is_free.clear()
    carriers[0].free()
    fabric: Any = SimpleNamespace(rank=0)
    later = NcclCarriers(fabric, Grid(1), Worker(), ranks[0], carriers[0]._stream)
    later._aborts = carriers[0]._aborts
    with pytest.raises(CarrierError, match=r"aborting a group within 0\.05 s"):
        later.make((0,))
    ranks[0].memory_is_free.set()


def test_nccl_group_is_kept_until_the_next_one_is_made_if_no_operation_is_under_way() -> None:
    _, carriers, crosses = make_ranks(2)
    freed: list[str] = []
    host: Any = SimpleNamespace(retire=lambda: freed.append("host"), free=lambda: freed.append("host"))
    both = HostAndDevice(carriers[0], host, Worker())
    cross = CrossGroup(both, Worker())
    cross.retire()
    assert freed == ["host"]
    assert not carriers[0]._aborts
    assert cross.all_reduce(on_device(torch.ones(3))).refused
    cross.abort_operations()
    assert len(carriers[0]._aborts) == 1
    crosses[1].abort_operations()


@pytest.mark.guarantee(
    "Joining", "A joining rank has made its first group of NCCL, which takes a second, before it asks."
)
def test_nccl_warm_up_makes_and_aborts_a_group_of_this_rank_alone() -> None:
    stream = LateDevice().stream()
    rank = Rank(Groups(), {stream.handle: stream})
    fabric: Any = SimpleNamespace(rank=2)
    carriers = NcclCarriers(fabric, Grid(3), Worker(), rank, stream)
    host: Any = SimpleNamespace(settle=0.0, writes_remotely=False)
    HostAndDeviceCarriers(carriers, host, Worker()).warm_up()
    ((address, group),) = rank._groups.joined.items()
    assert list(group) == [0]
    assert rank._operation == 1, "the first operation takes long, too"
    assert not carriers._unused
    assert not carriers._aborts, "the members would wait for the abort"
    alone = carriers.make((2,))
    alone.build({2: alone.offer()}, bool, lambda: False)
    assert next(iter(rank._groups.joined)) == address
    assert len(rank._groups.joined) == 2
    assert not rank.aborted
    assert not rank.crowded


def test_nccl_death_during_group_creation_is_not_waited_for() -> None:
    groups, stream = Groups(), LateDevice().stream()
    rank = Rank(groups, {stream.handle: stream})
    carrier = NcclCarrier(Worker(), (0, 1), 0, rank, stream, [], [])
    looks = iter([False, False, True])
    with pytest.raises(CarrierError, match="a member died"):
        carrier.build({0: carrier.offer(), 1: b""}, bool, lambda: next(looks))


@pytest.mark.guarantee(
    "Membership",
    "A rank whose NCCL trial or host carrier fails alone is not waited for; no NCCL call stays open and no "
    "address unused.",
)
def test_nccl_rank_whose_trial_fails_alone_is_not_waited_for_without_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recover.world.carriers.base.TRIAL_LIMIT", 0.3)
    groups, peers, carriers = Groups(), (0, 1, 2), []
    for number in peers:
        stream = LateDevice().stream()
        rank = Rank(groups, {stream.handle: stream})
        if number == 1:
            rank._launch = lambda *_: None  # type: ignore[method-assign]  # as in a library that has gone wrong
        carriers.append(NcclCarrier(Worker(), peers, number, rank, stream, [], []))
    offers = {number: carrier.offer() for number, carrier in enumerate(carriers)}
    failed: dict[int, type[Exception]] = {}

    def build(carrier: NcclCarrier) -> None:
        with pytest.raises(CarrierError, match="trial reduction") as raised:
            carrier.build(offers, bool, lambda: False)
        failed[carrier.index] = raised.type

    builders = [threading.Thread(target=build, args=[carrier], daemon=True) for carrier in carriers]
    for each in builders:
        each.start()
    for each in builders:
        each.join(20)
    assert failed == {0: TookTooLongError, 1: CarrierError, 2: TookTooLongError}, "whose fault it was"


def test_nccl_rank_freed_by_a_late_peer_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI's revoking and gloo's sockets free a rank a moment before its own time limit."""
    monkeypatch.setattr("recover.world.carriers.base.TRIAL_LIMIT", 100.0)
    now = [0.0]
    monkeypatch.setattr("recover.world.carriers.base.time.monotonic", lambda: now[0])
    carrier = NcclCarrier(Worker(), (0, 1), 0, Rank(Groups(), {}), LateDevice().stream(), [], [])

    def after(seconds: float, fails: bool) -> bool:
        """Whether the rank counts as waiting, if the communication thread fails, or ends, after these seconds."""
        waits, now[0] = threading.Event(), 0.0

        def end() -> None:
            waits.wait(30)
            now[0] = seconds
            if fails:
                raise CarrierError("revoked")

        def begun() -> bool:
            waits.set()
            return False

        return carrier.await_or_free(carrier._worker.post(end), begun)

    assert after(90.0, fails=True)
    assert not after(1.0, fails=True)
    assert not after(90.0, fails=False)


@pytest.mark.guarantee(
    "Membership",
    "A rank whose NCCL trial or host carrier fails alone is not waited for; no NCCL call stays open and no "
    "address unused.",
)
def test_nccl_address_that_was_not_used_is_offered_again() -> None:
    """For each address, NCCL keeps a thread and a socket that wait for its group for ever."""
    unused: list[bytes] = []
    stream = LateDevice().stream()
    rank = Rank(Groups(), {stream.handle: stream})

    def carrier() -> NcclCarrier:
        return NcclCarrier(Worker(), (0,), 0, rank, stream, [], unused)

    first = carrier()
    address = first.offer()
    first.free()
    first.free()
    second = carrier()
    assert second.offer() == address
    second.build({0: address}, bool, lambda: False)
    second.free()
    assert carrier().offer() != address


class LibraryThatFails:
    """NCCL's functions, of which one returns an error."""

    def __init__(self, bad: str) -> None:
        self._bad = bad
        self.open = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            self.open += {"ncclGroupStart": 1, "ncclGroupEnd": -1}.get(name, 0)
            if name in ("ncclGetErrorString", "ncclGetLastError"):
                return b"remote error"
            return 6 if name == self._bad else 0

        return call


@pytest.mark.guarantee(
    "Membership",
    "A rank whose NCCL trial or host carrier fails alone is not waited for; no NCCL call stays open and no "
    "address unused.",
)
@pytest.mark.parametrize("bad", ["ncclSend", "ncclRecv", "ncclGroupEnd"])
def test_nccl_call_group_is_closed_after_an_error(bad: str) -> None:
    """Otherwise this thread could never begin an operation again, in any group."""
    library = Nccl.__new__(Nccl)
    failing = library._library = LibraryThatFails(bad)  # type: ignore[assignment]
    with pytest.raises(CarrierError, match="remote error"):
        library.exchange([(1, 8, 4)], [(2, 16, 4)], "int64", 1, 2)
    assert failing.open == 0


def test_nccl_member_without_the_library_is_distinguished_from_a_late_one() -> None:
    carrier = NcclCarrier(Worker(), (0, 1), 1, Rank(Groups(), {}), LateDevice().stream(), [], [])
    with pytest.raises(CarrierError, match="could not offer"):
        carrier.connect({0: b"", 1: b""}, bool, lambda: False)


def test_nccl_data_is_awaited_on_the_device_and_not_by_the_host() -> None:
    ranks, carriers, _ = make_ranks(1)
    del ranks
    producer_device = LateDevice()
    producer = producer_device.stream()
    source, out = on_device(torch.zeros(5)), on_device(torch.zeros(5))
    producer.copy(source, torch.full((5,), 4.0))
    ready = Ready()
    ready.events = [producer.record()]
    carriers[0].follow(ready)
    rest = carriers[0].all_reduce(source, out)
    assert source.tolist() == [0.0] * 5  # the copy is queued, and the host has not waited for it
    assert rest is not None
    rest.wait()
    assert out.tolist() == [4.0] * 5
