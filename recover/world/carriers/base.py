"""What every carrier can do, and the one operation that each must pass before it is trusted."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from recover.world.carriers.contract import CarrierError, Carriers, TookTooLongError
from recover.world.carriers.worker import Rest, Work, Worker

Array = npt.NDArray[Any]
Data = Any  # a NumPy array, or a torch tensor on whatever device
WIRE_TYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int32), np.dtype(np.int64))
_WIRE_NAMES = frozenset(map(str, WIRE_TYPES))
TRIAL_LIMIT = 30.0  # seconds: one that has failed alone, and lives, does not come


class Ready:
    """The moment at which data are complete, in the order of the device that makes them; on the host that is now."""

    def __init__(self, *data: Data) -> None:
        """Of all of `data`, as the caller's own stream of work leaves them."""
        self.events: list[Any] = []
        for device in {each.device: None for each in data if getattr(each, "is_cuda", False)}:
            import torch

            event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
            torch.cuda.current_stream(device).record_event(event)
            self.events.append(event)

    @property
    def is_past(self) -> bool:
        """Whether it has come."""
        return all(event.query() for event in self.events)

    def wait(self) -> None:
        """The host waits for it."""
        for event in self.events:
            event.synchronize()


class DataCarrier(ABC):
    """The cross-replica group of one epoch: the ranks of all replicas that hold the same shard.

    Operations run on the communication thread, take arrays and tensors of any real type wherever they are, and raise
    CarrierError. They block, or return what is left to wait for when a device goes on with them. `follow` is called
    before each of them. A group of one needs no wire.
    """

    # Whether a sum that has ended well here is right, whoever of the others has given it up, and died since.
    ends_cleanly = True

    def __init__(self, worker: Worker, peers: tuple[int, ...], rank: int) -> None:
        self.peers = peers
        self.index = peers.index(rank)
        self._worker = worker

    @property
    def size(self) -> int:
        return len(self.peers)

    @property
    def carried(self) -> int:
        """A count that grows while an operation is under way and its data travel, as far as this can be seen."""
        return 0

    @abstractmethod
    def offer(self) -> bytes: ...

    @abstractmethod
    def connect(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        """Make the group. Raises CarrierError."""

    @abstractmethod
    def free(self) -> None: ...

    def follow(self, ready: Ready) -> None:
        """Order the next operation behind the caller's work on its buffers: those that it reads, and those that it
        writes to, which the caller may still be reading. The host waits; a carrier with a stream of its own lets the
        stream wait."""
        ready.wait()

    @abstractmethod
    def all_reduce(self, source: Data, out: Data) -> Rest | None:
        """Sum over the group; `out` may be `source`, otherwise the source stays as it was."""

    @abstractmethod
    def all_max(self, data: Data) -> Rest | None:
        """The maximum over the group, element by element, in place; int32 only."""

    @abstractmethod
    def broadcast(self, data: Data, root: int) -> Rest | None: ...

    @abstractmethod
    def all_gather(self, source: Data, out: Data) -> Rest | None:
        """`out` has one row per group member."""

    @abstractmethod
    def exchange(self, out: Mapping[int, Data], into: Mapping[int, Data]) -> Rest | None:
        """`out` to members of the group, by their number, and `into` from members, all at once; int64 only.

        Only those take part who are named, each in its own exchange: what goes from one to another comes in order.
        """

    @abstractmethod
    def barrier(self) -> Rest | None: ...

    def build(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        self.connect(offers, confirm, alarmed)
        ones = np.ones(4096, dtype=np.int64)
        total = np.empty_like(ones)
        work = self._worker.post(lambda: self.all_reduce(ones, total))
        if self.await_or_free(work, alarmed):
            raise TookTooLongError(f"the trial reduction was not through after {TRIAL_LIMIT:g} s")
        if not work.ok:
            raise CarrierError(f"the trial reduction failed: {work.error}")
        if not (total == self.size).all():
            raise CarrierError(
                f"the trial reduction over {self.size} ranks gave {total.min()}..{total.max()}"
            )

    def await_or_free(self, work: Work, alarmed: Callable[[], bool]) -> bool:
        """Wait for the communication thread; if a member dies meanwhile, free it. Whether it took too long: the first
        one that finds so frees others a moment before their time, and they have only waited, too."""
        began = time.monotonic()
        while not work.wait(0.001) and not work.done:
            if alarmed() or time.monotonic() - began > TRIAL_LIMIT:
                self.free()
        return not work.ok and time.monotonic() - began > 0.8 * TRIAL_LIMIT


class DataCarriers(Carriers[DataCarrier], ABC):
    """The maker of carriers, one per epoch."""

    settle: float

    @abstractmethod
    def make(self, members: tuple[int, ...]) -> DataCarrier: ...


def wire_type(data: Data) -> str:
    """The type in which data travel: their own, or float32. Raises TypeError for what has no sum of that kind."""
    name = str(data.dtype).removeprefix("torch.")
    if name.startswith("complex"):
        raise TypeError(f"{name} does not travel; pass the real view of the tensor (torch.view_as_real)")
    return name if name in _WIRE_NAMES else "float32"
