"""The cross-replica group as its users see it: arrays and tensors in, works out, errors latched until the vote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from recover.carriers.base import WIRE_TYPES, Array, DataCarrier
from recover.carriers.contract import CarrierError
from recover.carriers.worker import Work, Worker


class CrossGroup:
    """One rank's group of same-shard peers, for one epoch.

    Every operation returns a `Work` at once and runs on the communication thread; `work.wait()` makes it
    blocking. After the first error the group is broken: later operations fail at once, nothing is retried, and
    the caller goes to the vote.
    """

    def __init__(
        self, carrier: DataCarrier, worker: Worker, reduced: Callable[[], None] = lambda: None
    ) -> None:
        self.size = carrier.size
        self.index = carrier.index
        self.peers = carrier.peers
        self.error: Exception | None = None
        self._carrier, self._worker, self._reduced = carrier, worker, reduced

    def all_reduce(self, source: Any, out: Any = None) -> Work:
        """Sum over the group: in place, or into `out` with the source left as it was.

        NumPy arrays and torch tensors of float32, float64, int32 and int64 that are contiguous and on the CPU travel
        without a copy; anything else goes through float32 on the host.
        """
        out = source if out is None else out
        send = _Staged(source)
        receive = send if out is source else _Staged(out)

        def task() -> None:
            send.load()
            self._carrier.all_reduce(send.array, receive.array)
            receive.store()

        return self._post(task)

    def broadcast(self, data: Any, root: int = 0) -> Work:
        """`data` of the group's member number `root`, in place on all others."""
        staged = _Staged(data)

        def task() -> None:
            staged.load()
            self._carrier.broadcast(staged.array, root)
            staged.store()

        return self._post(task)

    def all_gather(self, source: Any, out: Any) -> Work:
        """Every member's `source`, as rows of `out`."""
        if len(out) != self.size:
            raise ValueError(
                f"all_gather: out has {len(out)} rows for a group of {self.size}; give it one per member"
            )
        send, receive = _Staged(source), _Staged(out)

        def task() -> None:
            send.load()
            self._carrier.all_gather(send.array, receive.array)
            receive.store()

        return self._post(task)

    def barrier(self) -> Work:
        return self._post(self._carrier.barrier)

    def drain(self) -> None:
        """Wait until all that was posted has ended, well or not: the communication thread is idle at the vote."""
        self._worker.drain()

    def break_off(self, why: str = "a member of the world has died") -> None:
        """Free whoever is blocked, here and at the peers. From any thread."""
        if self.error is None:
            self.error = CarrierError(why)
        self._carrier.free()

    def _post(self, task: Callable[[], None]) -> Work:
        if self.error is not None:
            return Work.failed(self.error)
        return self._worker.post(lambda: self._run(task))

    def _run(self, task: Callable[[], None]) -> None:
        if self.error is not None:
            raise self.error
        try:
            task()
        except Exception as error:
            self.error = self.error or error
            self._carrier.free()
            raise
        self._reduced()


class _Staged:
    """A view of the caller's memory that the wire can use, or a copy on the host where there is none.

    The copy has the caller's type if that can travel, otherwise float32.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._is_tensor = not isinstance(data, np.ndarray)
        name = str(data.dtype).removeprefix("torch.")
        if name.startswith("complex"):
            raise TypeError(f"{name} does not travel; pass the real view of the tensor (torch.view_as_real)")
        travels = name in {str(dtype) for dtype in WIRE_TYPES}
        if self._is_tensor:
            direct = travels and data.device.type == "cpu" and data.is_contiguous()
        else:
            direct = travels and data.flags.c_contiguous
        self._copied = not direct
        if self._copied:
            self.array: Array = np.empty(tuple(data.shape), name if travels else np.float32)
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
        else:
            self._data[...] = self.array

    def _host(self) -> Any:
        import torch

        return torch.from_numpy(self.array)
