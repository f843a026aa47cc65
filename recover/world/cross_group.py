"""The cross-replica group: posts operations on arrays and tensors, and keeps the first error until
the vote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from recover.world.carriers.base import DataCarrier, Ready, wire_type
from recover.world.carriers.contract import CarrierError
from recover.world.carriers.worker import Completion, Work, Worker

T = TypeVar("T")


class CrossGroup:
    """One rank's group of same-shard peers, for one epoch.

    Every operation returns a `Work` at once and runs on the communication thread; `work.wait()`
    blocks. After the first error the group is broken: later operations fail at once, nothing is
    retried, and the caller goes to the vote.
    """

    def __init__(
        self,
        carrier: DataCarrier,
        worker: Worker,
        reduced: Callable[[], None] = lambda: None,
        announce: Callable[..., None] = lambda name, data=None, root=0: None,
    ) -> None:
        """`reduced`: called after an operation that succeeded; `announce`: called before one in which
        all members take part, with its name, this rank's data and the root."""
        self.size = carrier.size
        self.index = carrier.index
        self.peers = carrier.peers
        self.ends_cleanly = carrier.ends_cleanly
        self.error: Exception | None = None
        self._carrier, self._worker, self._reduced = carrier, worker, reduced
        self._announce = announce

    def all_reduce(self, source: Any, out: Any = None) -> Work:
        """Sum over the group: in place, or into `out` with the source unchanged.

        Takes NumPy arrays and torch tensors; on a GPU the sum is ordered behind the current stream.
        float32, float64, int32 and int64 travel unchanged, other types as float32.
        """
        out = source if out is None else out
        self._announce("all_reduce", source)
        return self._post(lambda: self._carrier.all_reduce(source, out), source, out)

    def all_max(self, data: Any) -> Work:
        """The maximum over the group, element by element, in place; int32 only."""
        self._announce("all_max", data)
        return self._post(lambda: self._carrier.all_max(data), data)

    def broadcast(self, data: Any, root: int = 0) -> Work:
        """Broadcast `data` of the group's member number `root`, in place on all others."""
        self._announce("broadcast", data, root)
        return self._post(lambda: self._carrier.broadcast(data, root), data)

    def all_gather(self, source: Any, out: Any) -> Work:
        """Gather every member's `source` as rows of `out`."""
        if len(out) != self.size:
            raise ValueError(
                f"all_gather: out has {len(out)} rows for a group of {self.size}; give it one per member"
            )
        self._announce("all_gather", source)
        return self._post(lambda: self._carrier.all_gather(source, out), source, out)

    def exchange(self, out: Mapping[int, Any], into: Mapping[int, Any]) -> Work:
        """Send `out` to members of the group, by their number in it, and receive `into` from
        members; int64 only."""
        return self._post(lambda: self._carrier.exchange(out, into), *out.values(), *into.values())

    def barrier(self) -> Work:
        self._announce("barrier")
        return self._post(self._carrier.barrier)

    @property
    def carried(self) -> int:
        """A count that grows while data of an operation travel, as far as the carrier can see that."""
        return self._carrier.carried

    def drain(self) -> None:
        """Wait until all posted operations have ended.

        The communication thread must be idle at the vote.
        """
        self._worker.drain()

    def abort_operations(self, why: str = "a member of the world has died") -> None:
        """Wake all threads that are blocked in an operation, on this rank and its peers.

        Any thread may call this.
        """
        if self.error is None:
            self.error = CarrierError(why)
        self._carrier.free()

    def retire(self) -> None:
        """Refuse further operations. None is under way, so what takes long to free may wait for
        `abort_operations`, which must follow."""
        if self.error is None:
            self.error = CarrierError("a new group is being made")
        self._carrier.retire()

    def _post(self, task: Callable[[], Completion | None], *data: Any) -> Work:
        """`data`: every buffer that the operation reads or writes."""
        for each in data:
            wire_type(each)  # raises in the caller's thread
        # Recorded now, in the caller's thread: the operation is ordered behind the caller's work so
        # far, not behind later work.
        ready = Ready(*data)
        if self.error is not None:
            return Work.failed(self.error)
        return self._worker.post(lambda: self._run(task, ready), lambda: ready.is_past)

    def _run(self, task: Callable[[], Completion | None], ready: Ready) -> Completion | None:
        if self.error is not None:
            raise self.error

        def ordered() -> Completion | None:
            self._carrier.follow(ready)
            return task()

        completion = self._latched(ordered)
        if completion is None:
            self._reduced()
            return None

        def finish() -> None:
            self._latched(completion.wait)
            self._reduced()

        return Completion(finish, completion.passed)

    def _latched(self, part: Callable[[], T]) -> T:
        try:
            return part()
        except Exception as error:
            self.error = self.error or error
            self._carrier.free()
            raise
