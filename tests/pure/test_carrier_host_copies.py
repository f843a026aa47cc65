"""Host copies of data that cannot travel unchanged live as long as the library may write to them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from recover.world.carriers.base import Array
from recover.world.carriers.contract import CarrierError
from recover.world.carriers.host_memory import HostCarrier, StagingByDevice
from recover.world.carriers.worker import Work, Worker
from recover.world.cross_group import CrossGroup


class Library(HostCarrier):
    """A carrier that fails every operation and, as a native library does, remembers its buffers without keeping them
    alive."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, (0, 1), 0, StagingByDevice())
        self.buffers: list[weakref.ref[Array]] = []

    def _fail(self, *arrays: Array) -> None:
        self.buffers += map(weakref.ref, arrays)
        raise CarrierError("a member died")

    def sum(self, source: Array, out: Array) -> None:
        self._fail(source, out)

    def maximum(self, data: Array) -> None:
        self._fail(data)

    def copy_from(self, data: Array, root: int) -> None:
        self._fail(data)

    def gather(self, source: Array, out: Array) -> None:
        self._fail(source, out)

    def swap(self, out: Mapping[int, Array], into: Mapping[int, Array]) -> None:
        self._fail(*out.values(), *into.values())

    def meet(self) -> None: ...
    def offer(self) -> bytes: ...  # type: ignore[empty-body]
    def connect(self, *_: Any) -> None: ...
    def free(self) -> None: ...


def half() -> torch.Tensor:
    """A tensor of a type that travels as float32."""
    return torch.ones(6, dtype=torch.bfloat16)


def every_second(dtype: type) -> Array:
    """An array that is not contiguous."""
    return np.ones(12, dtype)[::2]


OPERATIONS: dict[str, Callable[[CrossGroup], Work]] = {
    "all_reduce": lambda cross: cross.all_reduce(half(), half()),
    "all_reduce in place": lambda cross: cross.all_reduce(half()),
    "all_max": lambda cross: cross.all_max(every_second(np.int32)),
    "broadcast": lambda cross: cross.broadcast(half()),
    "all_gather": lambda cross: cross.all_gather(half(), torch.ones(2, 6, dtype=torch.bfloat16)),
    "exchange": lambda cross: cross.exchange({1: every_second(np.int64)}, {1: every_second(np.int64)}),
}


@pytest.mark.guarantee(
    "Membership", "Host copies of a failed operation live exactly as long as the library may write to them."
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_host_copies_of_a_failed_operation_live_as_long_as_its_work(operation: str) -> None:
    """World keeps failed works until the ranks have agreed again; then the copies must be freed with them."""
    worker = Worker()
    carrier = Library(worker)
    buffers = carrier.buffers
    work = OPERATIONS[operation](CrossGroup(carrier, worker))
    del carrier
    assert not work.wait()
    worker.drain()
    while not (failed := worker.take_failed()):
        pass
    assert failed == [work]
    gc.collect()
    assert buffers
    assert all(buffer() is not None for buffer in buffers), "freed while the library may write to it"
    del failed, work
    assert not worker.busy  # its thread holds the work no longer
    gc.collect()
    assert not any(buffer() is not None for buffer in buffers), "kept for ever"
