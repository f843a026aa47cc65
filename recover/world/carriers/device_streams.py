"""The order of work on a device: streams, and events in them.

Copies are enqueued here and run later, in stream order.

An interface, so that the order of operations can be tested without a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from recover.job.process import rank_on_host


class Event(Protocol):
    """A position in the order of a stream."""

    def synchronize(self) -> None:
        """Block the host until the stream has reached it."""

    def wait(self) -> None:
        """Order all later work of this thread on its current device behind it. See `hold_back`."""


class Stream(Protocol):
    def wait(self, event: Any) -> None:
        """Order all later work of this stream behind an event of another stream."""

    def copy(self, target: Any, source: Any) -> None:
        """Enqueue a copy. One of the two is pinned memory of the host."""

    def record(self) -> Event: ...


def hold_back(data: Any, event: Any) -> None:
    """Order all later work of this thread on the device of `data` behind `event`, whatever its
    current device is."""
    if not getattr(data, "is_cuda", False):
        event.wait()
        return
    import torch

    torch.cuda.current_stream(data.device).wait_event(event)


def own_device() -> Any:
    """This rank's GPU: the current device if one was chosen, otherwise by the rank's number on its
    host."""
    import torch

    if not torch.cuda.is_initialized():
        torch.cuda.set_device(rank_on_host() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


class CudaStream:
    """A stream of a GPU, with the calls of the GPU that carriers need."""

    def __init__(self, device: Any, first: bool = False) -> None:
        """`first`: with a higher priority than other work on the device."""
        import torch

        self._torch = torch
        self.device = torch.device(device)
        self._own = torch.cuda.Stream(self.device, priority=-1 if first else 0)

    @property
    def handle(self) -> int:
        """The stream as CUDA's own functions take it."""
        return int(self._own.cuda_stream)

    def wait(self, event: Any) -> None:
        self._own.wait_event(event)

    def copy(self, target: Any, source: Any) -> None:
        with self._torch.cuda.stream(self._own):
            target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        event = self._torch.cuda.Event(blocking=True)  # a waiting thread sleeps
        self._own.record_event(event)
        return event

    def holds(self, data: Any) -> bool:
        """Whether `data` are on a GPU."""
        return bool(getattr(data, "is_cuda", False))

    def new(self, shape: Sequence[int], kind: str) -> Any:
        """Allocate memory on the device, for use in the order of this stream."""
        with self._torch.cuda.stream(self._own):
            return self._torch.empty(tuple(shape), dtype=getattr(self._torch, kind), device=self.device)

    def on_device(self) -> AbstractContextManager[Any]:
        """Make this device the current one of the thread."""
        return self._torch.cuda.device(self.device)
