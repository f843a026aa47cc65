"""Every operation of every carrier is ordered behind the caller's stream, for all buffers that it reads or writes.

The caller's device is a stream whose copies run as late as they may. Before each operation the caller asks for two
copies: one fills the buffers that the operation reads, the other saves the old content of those that it overwrites.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from streams import LateDevice, LateStream, on_device
from test_host_and_device_carrier import Meeting, ThreadsOfOneHost, connected
from test_nccl import make_ranks

from recover.world.carriers.base import DataCarrier, Ready
from recover.world.carriers.lone import LoneCarrier
from recover.world.carriers.worker import Work, Worker
from recover.world.cross_group import CrossGroup

LENGTH = 6
OLD = -5


def host_group(size: int) -> list[CrossGroup]:
    meeting, peers = Meeting(size), tuple(range(size))
    workers = [Worker() for _ in peers]
    return [
        CrossGroup(ThreadsOfOneHost(worker, peers, rank, meeting), worker)
        for rank, worker in enumerate(workers)
    ]


def lone_group(size: int) -> list[CrossGroup]:
    del size
    worker = Worker()
    return [CrossGroup(LoneCarrier(worker, (0,), 0), worker)]


GROUPS: dict[str, Callable[[int], list[CrossGroup]]] = {
    "nccl": lambda size: make_ranks(size)[2],
    "host": host_group,
    "host and device": lambda size: connected(size)[2],
    "lone": lone_group,
}


class Caller:
    """The buffers of one rank and the stream on which its program works with them."""

    def __init__(self, rank: int) -> None:
        self.rank, self.stream = rank, LateDevice().stream()
        self._expected: list[tuple[torch.Tensor, torch.Tensor]] = []

    def source(self, value: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A buffer that is filled late."""
        buffer = on_device(torch.full((LENGTH,), OLD, dtype=dtype))
        self.stream.copy(buffer, torch.full((LENGTH,), value, dtype=dtype))
        return buffer

    def target(self, *shape: int) -> torch.Tensor:
        """A buffer whose old content is read late."""
        buffer = on_device(torch.full(shape or (LENGTH,), OLD, dtype=torch.int64))
        seen = torch.zeros_like(buffer)
        self.stream.copy(seen, buffer)
        self._expected.append((seen, torch.full_like(buffer, OLD)))
        return buffer

    def check(self) -> None:
        self.stream.record().synchronize()
        for seen, expected in self._expected:
            assert torch.equal(seen, expected), "a buffer was overwritten before the caller had read it"


def in_place_sum(cross: CrossGroup, caller: Caller) -> tuple[Work, torch.Tensor, list[Any]]:
    data = caller.source(caller.rank + 1)
    return cross.all_reduce(data), data, [sum(range(1, cross.size + 1))] * LENGTH


def out_of_place_sum(cross: CrossGroup, caller: Caller) -> tuple[Work, torch.Tensor, list[Any]]:
    source, out = caller.source(caller.rank + 1), caller.target()
    return cross.all_reduce(source, out), out, [sum(range(1, cross.size + 1))] * LENGTH


def all_max(cross: CrossGroup, caller: Caller) -> tuple[Work, torch.Tensor, list[Any]]:
    data = caller.source(caller.rank + 1, torch.int32)
    return cross.all_max(data), data, [cross.size] * LENGTH


def broadcast(cross: CrossGroup, caller: Caller) -> tuple[Work, torch.Tensor, list[Any]]:
    data = caller.source(7) if caller.rank == 0 else caller.target()
    return cross.broadcast(data, 0), data, [7] * LENGTH


def all_gather(cross: CrossGroup, caller: Caller) -> tuple[Work, torch.Tensor, list[Any]]:
    source, out = caller.source(caller.rank), caller.target(cross.size, LENGTH)
    return cross.all_gather(source, out), out, [[rank] * LENGTH for rank in range(cross.size)]


def send_or_receive(cross: CrossGroup, caller: Caller) -> tuple[Work, torch.Tensor, list[Any]]:
    """Rank 0 only sends, all others only receive: the transfer of state to joining replicas."""
    if caller.rank == 0:
        data = caller.source(7)
        return cross.exchange(dict.fromkeys(range(1, cross.size), data), {}), data, [7] * LENGTH
    data = caller.target()
    return cross.exchange({}, {0: data}), data, [7] * LENGTH


def send_and_receive(cross: CrossGroup, caller: Caller) -> tuple[Work, torch.Tensor, list[Any]]:
    source, out, following = caller.source(caller.rank), caller.target(), (caller.rank + 1) % cross.size
    previous = (caller.rank - 1) % cross.size
    if cross.size == 1:
        return cross.exchange({}, {}), out, [OLD] * LENGTH
    return cross.exchange({following: source}, {previous: out}), out, [previous] * LENGTH


OPERATIONS = [
    in_place_sum,
    out_of_place_sum,
    all_max,
    broadcast,
    all_gather,
    send_or_receive,
    send_and_receive,
]


@pytest.mark.guarantee(
    "Membership",
    "Every carrier operation is ordered behind the caller's stream for all buffers that it reads or writes.",
)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("group", GROUPS)
def test_carrier_operations_wait_for_the_stream_of_the_caller(
    group: str, operation: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    crosses = GROUPS[group](3)
    callers = [Caller(rank) for rank in range(len(crosses))]
    begun = []
    for cross, caller in zip(crosses, callers, strict=True):
        monkeypatch.setattr(
            "recover.world.cross_group.Ready", lambda *data, on=caller.stream: _recorded(on, data)
        )
        begun.append(operation(cross, caller))
    for (work, result, expected), caller in zip(begun, callers, strict=True):
        assert work.wait(60), work.error
        caller.check()
        assert result.tolist() == expected


@pytest.mark.guarantee(
    "Membership",
    "Every carrier operation is ordered behind the caller's stream for all buffers that it reads or writes.",
)
@pytest.mark.parametrize("group", ["nccl", "host and device", "host"])
def test_staging_buffer_is_reused_only_after_it_was_copied_out(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State travels in pieces through two alternating buffers, and is copied out of them on the caller's stream."""
    sender, receiver = GROUPS[group](2)
    stream = LateDevice().stream()
    pieces = [torch.full((LENGTH,), number, dtype=torch.int64) for number in range(8)]
    state = [torch.zeros(LENGTH, dtype=torch.int64) for _ in pieces]
    buffers = [on_device(torch.zeros(LENGTH, dtype=torch.int64)) for _ in range(2)]
    for number, piece in enumerate(pieces):
        sent = sender.exchange({1: on_device(piece)}, {})
        with monkeypatch.context() as patch:
            patch.setattr("recover.world.cross_group.Ready", lambda *data: _recorded(stream, data))
            received = receiver.exchange({}, {0: buffers[number % 2]})
        assert sent.wait(60), sent.error
        assert received.wait(60), received.error
        stream.copy(state[number], buffers[number % 2])
    stream.record().synchronize()
    assert [piece.tolist() for piece in state] == [piece.tolist() for piece in pieces]


def test_carrier_cannot_run_an_operation_before_the_callers_stream() -> None:
    """The order is kept in one place, before the carrier's own code: a new carrier cannot forget it."""
    followed: list[str] = []

    class Noting(LoneCarrier):
        def follow(self, ready: Ready) -> None:
            followed.append("follow")
            super().follow(ready)

        def __getattribute__(self, name: str) -> Any:
            if name in ("all_reduce", "broadcast", "all_gather", "exchange", "all_max"):
                followed.append(name)
            return super().__getattribute__(name)

    worker = Worker()
    carrier: DataCarrier = Noting(worker, (0,), 0)
    cross, data = CrossGroup(carrier, worker), torch.zeros(LENGTH, dtype=torch.int64)
    works = [cross.all_reduce(data), cross.broadcast(data), cross.all_gather(data, data.clone()[None])]
    works += [cross.exchange({}, {}), cross.all_max(data)]
    assert all(work.wait(60) for work in works)
    assert followed[::2] == ["follow"] * 5
    assert followed[1::2] == ["all_reduce", "broadcast", "all_gather", "exchange", "all_max"]


def _recorded(stream: LateStream, data: tuple[Any, ...]) -> Ready:
    """An event on the late stream, as `Ready` records one where data lie on a device."""
    ready = Ready()
    ready.events = [stream.record()] if any(map(stream.holds, data)) else []
    return ready
