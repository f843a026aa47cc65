"""The host and device carrier: data of a GPU travel by NCCL, data of the host by a host carrier, and a death frees the
waiters of both."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from streams import LateDevice, on_device
from test_nccl import Groups, Rank

from recover.world.carriers.base import Array
from recover.world.carriers.contract import CarrierError
from recover.world.carriers.host_and_device import HostAndDevice
from recover.world.carriers.host_memory import HostCarrier, StagingByDevice
from recover.world.carriers.nccl import NcclCarrier
from recover.world.carriers.worker import Worker
from recover.world.cross_group import CrossGroup


class ThreadsOfOneHost(HostCarrier):
    """Real sums among threads; a rank that waits for one that does not come is freed when any rank frees the group."""

    def __init__(self, worker: Worker, peers: tuple[int, ...], rank: int, meeting: Meeting) -> None:
        super().__init__(worker, peers, rank, StagingByDevice())
        self._meeting = meeting
        self.operations = 0

    def offer(self) -> bytes:
        return b"at number %d" % self.index

    def connect(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        if [offers[peer] for peer in self.peers] != [b"at number %d" % index for index in range(self.size)]:
            raise CarrierError(f"these are no offers of this carrier's: {offers}")

    def free(self) -> None:
        self._meeting.barrier.abort()

    def sum(self, source: Array, out: Array) -> None:
        out[...] = sum(self._exchange(source))

    def maximum(self, data: Array) -> None:
        data[...] = np.max(self._exchange(data), axis=0)

    def copy_from(self, data: Array, root: int) -> None:
        data[...] = self._exchange(data)[root]

    def gather(self, source: Array, out: Array) -> None:
        out[...] = np.stack(self._exchange(source))

    def swap(self, out: Mapping[int, Array], into: Mapping[int, Array]) -> None:
        self.operations += 1
        for peer, data in out.items():
            self._meeting.sent[self.index, peer].put(data.copy())
        for peer, data in into.items():
            data[...] = self._meeting.sent[peer, self.index].get(timeout=60)

    def meet(self) -> None:
        self._exchange(np.zeros(1))

    def _exchange(self, mine: Array) -> list[Array]:
        self.operations += 1
        try:
            self._meeting.brought[self.index] = mine.copy()
            self._meeting.barrier.wait(60)
            brought = [self._meeting.brought[index] for index in range(self.size)]
            self._meeting.barrier.wait(60)
        except threading.BrokenBarrierError:
            raise CarrierError("freed") from None
        return brought


class Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.brought: dict[int, Array] = {}
        self.sent: defaultdict[tuple[int, int], SimpleQueue[Array]] = defaultdict(SimpleQueue)


def connected(size: int) -> tuple[list[Rank], list[ThreadsOfOneHost], list[CrossGroup]]:
    groups, meeting, peers = Groups(), Meeting(size), tuple(range(size))
    ranks, hosts, pairs, crosses = [], [], [], []
    for number in peers:
        stream, worker = LateDevice().stream(), Worker()
        ranks.append(Rank(groups, {stream.handle: stream}))
        hosts.append(ThreadsOfOneHost(worker, peers, number, meeting))
        pairs.append(
            HostAndDevice(NcclCarrier(worker, peers, number, ranks[-1], stream, [], []), hosts[-1], worker)
        )
        crosses.append(CrossGroup(pairs[-1], worker))
    offers = {number: pair.offer() for number, pair in enumerate(pairs)}
    failures: list[BaseException] = []

    def build(pair: HostAndDevice) -> None:
        try:
            pair.build(offers, bool, lambda: False)
        except BaseException as error:
            failures.append(error)

    builders = [threading.Thread(target=build, args=[pair]) for pair in pairs]
    for each in builders:
        each.start()
    for each in builders:
        each.join(10)
    assert not failures, failures
    return ranks, hosts, crosses


def test_data_uses_the_carrier_of_its_device() -> None:
    ranks, hosts, crosses = connected(3)
    on_wire = [rank._operation for rank in ranks], [host.operations for host in hosts]
    rows = [np.full(4, n + 1.0) for n in range(3)]
    outs = [np.zeros(4) for _ in range(3)]
    numbers, tables = [np.array([n]) for n in range(3)], [np.zeros((3, 1)) for _ in range(3)]
    works: list[Any] = []
    for n, cross in enumerate(crosses):
        works += [cross.all_reduce(rows[n], outs[n]), cross.all_gather(numbers[n], tables[n])]
        works += [cross.broadcast(rows[n], root=2), cross.barrier()]
    head, taken = np.arange(3), np.zeros(3, np.int64)
    works += [crosses[0].exchange({1: head}, {}), crosses[1].exchange({}, {0: taken})]
    assert all(work.wait(10) for work in works), [work.error for work in works]
    assert [out.tolist() for out in outs] == [[6.0] * 4] * 3
    assert [table.ravel().tolist() for table in tables] == [[0.0, 1.0, 2.0]] * 3
    assert [row.tolist() for row in rows] == [[3.0] * 4] * 3
    assert taken.tolist() == head.tolist()
    assert [rank._operation for rank in ranks] == on_wire[0], "the device had to do with what is the host's"
    sums = [on_device(torch.full((5,), n + 1.0)) for n in range(3)]
    on_host = [host.operations for host in hosts]
    works = [cross.all_reduce(mine) for cross, mine in zip(crosses, sums, strict=True)]
    assert all(work.wait(10) for work in works), [work.error for work in works]
    assert [mine.tolist() for mine in sums] == [[6.0] * 5] * 3
    state, room = on_device(torch.arange(5)), on_device(torch.zeros(5, dtype=torch.int64))
    works = [crosses[0].exchange({1: state}, {}), crosses[1].exchange({}, {0: room})]
    assert all(work.wait(10) for work in works), [work.error for work in works]
    assert room.tolist() == state.tolist()
    assert [host.operations for host in hosts] == on_host, "a gradient went over the host's wire"


class Agreed:
    """A confirmation: true if all ranks say true."""

    def __init__(self, size: int) -> None:
        self._barrier, self._words = threading.Barrier(size), list[bool]()

    def __call__(self, word: bool) -> bool:
        self._words.append(word)
        self._barrier.wait(10)
        return all(self._words)


@pytest.mark.guarantee(
    "Membership",
    "A rank whose NCCL trial or host carrier fails alone is not waited for; no NCCL call stays open and no "
    "address unused.",
)
def test_host_carrier_failure_on_one_rank_keeps_others_out_of_nccl() -> None:
    """NCCL cannot see that a rank does not come, and the others would abort it only after a minute."""
    groups, meeting, peers, confirm = Groups(), Meeting(3), (0, 1, 2), Agreed(3)
    pairs = []
    for number in peers:
        stream, worker = LateDevice().stream(), Worker()
        host = ThreadsOfOneHost(worker, peers, number, meeting)
        if number == 1:

            def fail(*_: Any) -> None:
                raise CarrierError("a trial that one alone finds wrong")

            host.build = lambda *given, build=host.build: [build(*given), fail()]  # type: ignore[method-assign]
        device = NcclCarrier(worker, peers, number, Rank(groups, {stream.handle: stream}), stream, [], [])
        pairs.append(HostAndDevice(device, host, worker))
    offers = {number: pair.offer() for number, pair in enumerate(pairs)}
    told: dict[int, str] = {}

    def build(pair: HostAndDevice) -> None:
        with pytest.raises(CarrierError) as raised:
            pair.build(offers, confirm, lambda: False)
        told[pair.index] = str(raised.value)

    builders = [threading.Thread(target=build, args=[pair], daemon=True) for pair in pairs]
    for each in builders:
        each.start()
    for each in builders:
        each.join(20)
    assert told.keys() == set(peers)
    assert "one alone" in told[1]
    assert "was not built everywhere" in told[0]
    assert not groups.joined, "somebody has begun a group"


def test_rank_with_another_carrier_is_named() -> None:
    worker, peers = Worker(), (0, 1)
    stream = LateDevice().stream()
    device = NcclCarrier(worker, peers, 0, Rank(Groups(), {stream.handle: stream}), stream, [], [])
    pair = HostAndDevice(device, ThreadsOfOneHost(worker, peers, 0, Meeting(2)), worker)
    for offer in (b'[4711, "token", ["words"]]', b""):
        with pytest.raises(CarrierError, match="rank 1 has chosen another carrier than nccl"):
            pair.build({0: pair.offer(), 1: offer}, bool, lambda: False)


def test_death_frees_waiters_on_host_and_device_carrier() -> None:
    ranks, _, crosses = connected(3)
    on_gpu = crosses[0].all_reduce(on_device(torch.ones(3)))  # the third rank is dead
    on_host = crosses[1].all_reduce(np.ones(3))
    assert not on_gpu.wait(0.02)
    assert not on_host.wait(0.02)
    for rank, cross, work in zip(ranks, crosses[:2], (on_gpu, on_host), strict=False):
        cross.abort_operations()
        assert not work.wait(5)
        assert work.done, "nobody has freed it"
        assert cross.all_reduce(np.ones(3)).refused
        assert not rank.crowded
