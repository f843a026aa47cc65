"""What every carrier can do, and the one operation that each must pass before it is trusted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from recover.carriers.contract import CarrierError, Carriers
from recover.carriers.worker import Work, Worker

Array = npt.NDArray[Any]
WIRE_TYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int32), np.dtype(np.int64))


class DataCarrier(ABC):
    """The cross-replica group of one epoch: the ranks of all replicas that hold the same shard.

    Operations block, run on the communication thread, work on contiguous arrays of `WIRE_TYPES`, and raise
    CarrierError. A group of one needs no wire.
    """

    def __init__(self, worker: Worker, peers: tuple[int, ...], rank: int) -> None:
        self.peers = peers
        self.index = peers.index(rank)
        self._worker = worker

    @property
    def size(self) -> int:
        return len(self.peers)

    @abstractmethod
    def offer(self) -> bytes: ...

    @abstractmethod
    def connect(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        """Make the group. Raises CarrierError."""

    @abstractmethod
    def free(self) -> None: ...

    @abstractmethod
    def all_reduce(self, source: Array, out: Array) -> None:
        """Sum over the group; `out` may be `source`, otherwise the source stays as it was."""

    @abstractmethod
    def broadcast(self, data: Array, root: int) -> None: ...

    @abstractmethod
    def all_gather(self, source: Array, out: Array) -> None:
        """`out` has one row per group member."""

    @abstractmethod
    def barrier(self) -> None: ...

    def build(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        self.connect(offers, confirm, alarmed)
        ones = np.ones(4096, dtype=np.int64)
        total = np.empty_like(ones)
        work = self._worker.post(lambda: self.all_reduce(ones, total))
        self.await_or_free(work, alarmed)
        if not work.ok:
            raise CarrierError(f"the trial reduction failed: {work.error}")
        if not (total == self.size).all():
            raise CarrierError(
                f"the trial reduction over {self.size} ranks gave {total.min()}..{total.max()}"
            )

    def await_or_free(self, work: Work, alarmed: Callable[[], bool]) -> None:
        """Wait for the communication thread; if a member dies meanwhile, free it."""
        while not work.wait(0.001) and not work.done:
            if alarmed():
                self.free()


class DataCarriers(Carriers[DataCarrier], ABC):
    """The maker of carriers, one per epoch."""

    settle: float

    @abstractmethod
    def make(self, members: tuple[int, ...]) -> DataCarrier: ...
