"""Carriers that send from and receive into the memory of the host.

Data on a device are copied there and back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from recover.world.carriers.base import Array, Data, DataCarrier, Ready, wire_type
from recover.world.carriers.worker import Completion, Worker

if TYPE_CHECKING:
    from recover.world.carriers.pinned_staging import PinnedStaging

Wait = Callable[[], object]


class StagingByDevice:
    """The pinned staging of each device of this process, made on first use.

    It outlives the epochs.
    """

    def __init__(self) -> None:
        self._staging: dict[Any, PinnedStaging] = {}

    def to(self, device: Any) -> PinnedStaging:
        if device not in self._staging:
            from recover.world.carriers.pinned_staging import cuda_staging

            self._staging[device] = cuda_staging(device)
        return self._staging[device]


class HostCarrier(DataCarrier):
    """Subclasses move contiguous arrays of `WIRE_TYPES`.

    Such arrays on the host travel without a copy.
    """

    def __init__(self, worker: Worker, peers: tuple[int, ...], rank: int, staging: StagingByDevice) -> None:
        super().__init__(worker, peers, rank)
        self._staging = staging
        # Stands for this carrier in the staging, which must not keep the carrier alive.
        self._epoch = object()
        self._failed_views: list[_HostView] = []

    @contextmanager
    def _kept_on_failure(self, *views: _HostView) -> Iterator[None]:
        """Keep the host copies of an operation that fails: the library may still write to them.

        The failed work keeps this carrier, and the world keeps that work until the ranks have
        agreed again. Without this the copies, which only the frames of the operation hold, would be
        freed as soon as the error is caught.
        """
        try:
            yield
        except BaseException:
            self._failed_views += views
            raise

    def arrive(self) -> None:
        """Wait for the peers at the beginning of an operation, where that is cheaper than in the
        library."""
        return

    @abstractmethod
    def sum(self, source: Array, out: Array) -> None: ...

    def begin_sum(self, piece: Array) -> Wait | None:
        """Begin a sum in place; None if it has ended already.

        Several may be under way, and are awaited in order.
        """
        self.sum(piece, piece)
        return None

    @abstractmethod
    def maximum(self, data: Array) -> None:
        """The maximum over the group, element by element, in place."""

    @abstractmethod
    def copy_from(self, data: Array, root: int) -> None: ...

    @abstractmethod
    def gather(self, source: Array, out: Array) -> None: ...

    @abstractmethod
    def swap(self, out: Mapping[int, Array], into: Mapping[int, Array]) -> None: ...

    @abstractmethod
    def meet(self) -> None: ...

    def all_reduce(self, source: Data, out: Data) -> Completion | None:
        if _can_be_staged(source) and _can_be_staged(out):
            self.arrive()
            return self._staging.to(source.device).through(source, out, self.begin_sum, self._epoch)
        send = _HostView(source)
        receive = send if out is source else _HostView(out)
        send.load()
        with self._kept_on_failure(send, receive):
            self.arrive()
            self.sum(send.array, receive.array)
        receive.store()
        return None

    def all_max(self, data: Data) -> Completion | None:
        staged = _HostView(data)
        staged.load()
        with self._kept_on_failure(staged):
            self.arrive()
            self.maximum(staged.array)
        staged.store()
        return None

    def broadcast(self, data: Data, root: int) -> Completion | None:
        if _can_be_staged(data):
            self.arrive()

            def begin(piece: Array) -> None:
                self.copy_from(piece, root)

            return self._staging.to(data.device).through(data, data, begin, self._epoch)
        staged = _HostView(data)
        staged.load()
        with self._kept_on_failure(staged):
            self.arrive()
            self.copy_from(staged.array, root)
        staged.store()
        return None

    def all_gather(self, source: Data, out: Data) -> Completion | None:
        send, receive = _HostView(source), _HostView(out)
        send.load()
        with self._kept_on_failure(send, receive):
            self.arrive()
            self.gather(send.array, receive.array)
        receive.store()
        return None

    def exchange(self, out: Mapping[int, Data], into: Mapping[int, Data]) -> Completion | None:
        send = {peer: _HostView(data) for peer, data in out.items()}
        receive = {peer: _HostView(data) for peer, data in into.items()}
        for view in send.values():
            view.load()
        with self._kept_on_failure(*send.values(), *receive.values()):
            self.swap(
                {p: view.array for p, view in send.items()}, {p: view.array for p, view in receive.items()}
            )
        for view in receive.values():
            view.store()
        return None

    def barrier(self) -> Completion | None:
        self.arrive()
        self.meet()
        return None


def _can_be_staged(data: Data) -> bool:
    return bool(getattr(data, "is_cuda", False)) and bool(data.is_contiguous())


class _HostView:
    """A view of the caller's memory that the carrier can send, or a copy on the host where there is
    none."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._is_tensor = not isinstance(data, np.ndarray)
        wire = wire_type(data)
        direct = wire == str(data.dtype).removeprefix("torch.")
        if self._is_tensor:
            direct &= data.device.type == "cpu" and data.is_contiguous()
        else:
            direct &= data.flags.c_contiguous
        self._copied = not direct
        if self._copied:
            self.array: Array = np.empty(tuple(data.shape), wire)
        else:
            self.array = data.detach().numpy() if self._is_tensor else data

    def load(self) -> None:
        if not self._copied:
            return
        if self._is_tensor:
            self._host().copy_(self._data.detach())
        else:
            self.array[...] = self._data

    def store(self) -> None:
        if not self._copied:
            return
        if self._is_tensor:
            self._data.detach().copy_(self._host())
            Ready(self._data).wait()
        else:
            self._data[...] = self.array

    def _host(self) -> Any:
        import torch

        return torch.from_numpy(self.array)
