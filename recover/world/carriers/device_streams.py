"""The order of work on a device: streams, and events in them. Copies are asked for here and made later, in this order.

An interface, because what goes wrong with streams is their order, and that can be tried without a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from recover.job.process import rank_on_host


class Event(Protocol):
    """A place in the order of a stream."""

    def synchronize(self) -> None:
        """The host waits until the stream has passed it."""

    def wait(self) -> None:
        """What this thread asks of its current device from here on happens behind it; see `hold_back`."""


class Stream(Protocol):
    def wait(self, event: Any) -> None:
        """What is asked for from here on happens after this event of another stream."""

    def copy(self, target: Any, source: Any) -> None:
        """One of the two is memory of the host that the device can reach (pinned)."""

    def record(self) -> Event: ...


def hold_back(data: Any, event: Any) -> None:
    """What this thread asks of the device of `data` from here on, whichever is its current one, happens behind it."""
    if not getattr(data, "is_cuda", False):
        event.wait()
        return
    import torch

    torch.cuda.current_stream(data.device).wait_event(event)


def own_device() -> Any:
    """This rank's GPU: the current device if one was chosen, otherwise by the rank's number on its host."""
    import torch

    if not torch.cuda.is_initialized():
        torch.cuda.set_device(rank_on_host() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


class CudaStream:
    """A stream of a GPU, and what has to be asked of the GPU itself."""

    def __init__(self, device: Any, first: bool = False) -> None:
        """`first`: before other work on the device, where it has a choice."""
        import torch

        self._torch = torch
        self.device = torch.device(device)
        self._own = torch.cuda.Stream(self.device, priority=-1 if first else 0)

    @property
    def handle(self) -> int:
        """What CUDA's own functions call it."""
        return int(self._own.cuda_stream)

    def wait(self, event: Any) -> None:
        self._own.wait_event(event)

    def copy(self, target: Any, source: Any) -> None:
        with self._torch.cuda.stream(self._own):
            target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        event = self._torch.cuda.Event(blocking=True)  # who waits for it sleeps
        self._own.record_event(event)
        return event

    def holds(self, data: Any) -> bool:
        """Whether these data lie on a GPU."""
        return bool(getattr(data, "is_cuda", False))

    def new(self, shape: Sequence[int], kind: str) -> Any:
        """Memory on the device, to be used in the order of this stream."""
        with self._torch.cuda.stream(self._own):
            return self._torch.empty(tuple(shape), dtype=getattr(self._torch, kind), device=self.device)

    def on_device(self) -> AbstractContextManager[Any]:
        """Inside, this thread's calls of CUDA's own functions are meant for this device."""
        return self._torch.cuda.device(self.device)
