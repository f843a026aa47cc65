"""The interface of all carriers, and the trial reduction that each must pass before it is used."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from recover.world.carriers.contract import CarrierError, Carriers, TookTooLongError
from recover.world.carriers.worker import Completion, Work, Worker

Array = npt.NDArray[Any]
Data = Any  # a NumPy array, or a torch tensor on whatever device
WIRE_TYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int32), np.dtype(np.int64))
_WIRE_NAMES = frozenset(map(str, WIRE_TYPES))
TRIAL_LIMIT = 30.0  # seconds; a member whose own carrier failed does not take part in the trial


class Ready:
    """The moment at which data are complete, in the order of the device that makes them.

    For data on the host that is now.
    """

    def __init__(self, *data: Data) -> None:
        """Record the caller's current stream on every device of `data`."""
        self.events: list[Any] = []
        for device in {each.device: None for each in data if getattr(each, "is_cuda", False)}:
            import torch

            event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps
            torch.cuda.current_stream(device).record_event(event)
            self.events.append(event)

    @property
    def is_past(self) -> bool:
        """Whether the moment has passed."""
        return all(event.query() for event in self.events)

    def wait(self) -> None:
        """Block the calling thread until that moment."""
        for event in self.events:
            event.synchronize()


class DataCarrier(ABC):
    """The cross-replica group of one epoch: the ranks of all replicas that hold the same shard.

    Operations run on the communication thread, take arrays and tensors of any real type on any
    device, and raise CarrierError. They block, or return a completion that a device has yet to
    reach. `follow` is called before each of them. A group of one sends nothing.
    """

    # Whether a sum that has succeeded on this rank is right even if a peer has aborted it, or died
    # since.
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
        """A count that grows while data of an operation travel, as far as the carrier can see that."""
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

    def retire(self) -> None:
        """Free what can be freed quickly, before the next carrier is made. No operation is under way,
        and `free` follows once the next carrier has been made."""
        self.free()

    def follow(self, ready: Ready) -> None:
        """Order the next operation behind the caller's work on its buffers.

        That holds for buffers that the operation reads, and for those that it writes to, which the
        caller's stream may still be reading: without it a receive would overwrite them. The host
        waits; a carrier with a stream of its own makes the stream wait.
        """
        ready.wait()

    @abstractmethod
    def all_reduce(self, source: Data, out: Data) -> Completion | None:
        """Sum over the group. `out` may be `source`; otherwise `source` is unchanged."""

    @abstractmethod
    def all_max(self, data: Data) -> Completion | None:
        """The maximum over the group, element by element, in place; int32 only."""

    @abstractmethod
    def broadcast(self, data: Data, root: int) -> Completion | None: ...

    @abstractmethod
    def all_gather(self, source: Data, out: Data) -> Completion | None:
        """Gather every member's `source`: `out` has one row per group member."""

    @abstractmethod
    def exchange(self, out: Mapping[int, Data], into: Mapping[int, Data]) -> Completion | None:
        """Send `out` to members of the group, by their number, and receive `into` from members at
        once; int64 only.

        Only the named members take part. Messages from one member to another arrive in order.
        """

    @abstractmethod
    def barrier(self) -> Completion | None: ...

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
        """Wait for `work`, and free the carrier if a member dies meanwhile. Returns whether it took
        too long.

        The first member that reaches the limit frees the group, which ends the wait of the other
        members a moment before their own limit. They, too, have only waited for others, so 80% of
        the limit counts as too long.
        """
        began = time.monotonic()
        while not work.wait(0.001) and not work.done:
            if alarmed() or time.monotonic() - began > TRIAL_LIMIT:
                self.free()
        return not work.ok and time.monotonic() - began > 0.8 * TRIAL_LIMIT


class DataCarriers(Carriers[DataCarrier], ABC):
    """Factory of carriers, one per epoch.

    `writes_remotely`: a device writes to memory of other ranks, so it may do so until the process of
    a killed rank is gone.
    """

    settle: float
    writes_remotely = False

    def warm_up(self) -> None:
        """Do on this rank alone what the first carrier of a process would take time for."""

    @abstractmethod
    def make(self, members: tuple[int, ...]) -> DataCarrier: ...


def wire_type(data: Data) -> str:
    """The type in which data travel: their own, or float32. Raises TypeError for complex numbers."""
    name = str(data.dtype).removeprefix("torch.")
    if name.startswith("complex"):
        raise TypeError(f"{name} does not travel; pass the real view of the tensor (torch.view_as_real)")
    return name if name in _WIRE_NAMES else "float32"
