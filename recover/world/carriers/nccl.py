"""The `nccl` carrier: gradients stay on the GPUs.

Its group is made for the epoch, and aborted, never repaired.

The address of a group travels in the census, in which members alone take part: nothing listens for
it. NCCL is called directly (`recover.world.carriers.nccl_library`), not through torch's process
group, whose own watchdog may end the process, and which needs a store.

A kernel of NCCL that waits for a dead peer spins for ever. So the thread that learns of the death
starts a thread that aborts the group. The abort ends the kernel, and with it the wait of every
thread for the stream behind it. Then it waits for NCCL's own threads, which look every half second,
and frees memory: measured were 0.1 or 0.5 s in all. The next group is made when the abort has ended,
because NCCL is not known to stand both at once after a death. No other thread may be inside NCCL
with a group that is aborted. Where no operation is under way, because replicas join between two
steps, the old group is aborted after the new one is made.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from recover.job.grid import Grid
from recover.job.process import on_one_host
from recover.world.carriers.base import Data, DataCarrier, DataCarriers, Ready, wire_type
from recover.world.carriers.contract import CarrierError, TookTooLongError
from recover.world.carriers.device_streams import CudaStream, own_device
from recover.world.carriers.nccl_library import ID_BYTES, MAX, SUM, Nccl
from recover.world.carriers.worker import Completion, Worker
from recover.world.fabrics.base import Fabric

PATIENCE = 60.0  # seconds; the first group of a process takes one second, and all members make it at once
ABORT_LIMIT = 20.0  # seconds; up to 0.5 were measured
POLL = 0.0001  # seconds between two polls of a call of NCCL


class NcclCarriers(DataCarriers):
    settle = 0.0  # a death while a group is made does no harm
    writes_remotely = True

    def __init__(
        self,
        fabric: Fabric,
        grid: Grid,
        worker: Worker,
        library: Any = None,
        stream: Any = None,
    ) -> None:
        if on_one_host():
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # no other host needs to reach its sockets
        self._rank, self._grid, self._worker = fabric.rank, grid, worker
        self._library = library or Nccl()
        self._stream = stream or CudaStream(own_device(), first=True)
        self._aborts: list[threading.Thread] = []
        self._unused: list[bytes] = []  # addresses; behind each a thread of NCCL waits for its group

    def make(self, members: tuple[int, ...]) -> NcclCarrier:
        self._await_aborts()
        return self._make(self._grid.peers(self._rank, members))

    def warm_up(self) -> None:
        """Make and abort a group of this rank alone: the first one of a process takes a second."""
        alone = self._make((self._rank,))
        alone.build({self._rank: alone.offer()}, bool, lambda: False)
        alone.free()
        self._await_aborts()  # the members would wait for that, too

    def _await_aborts(self) -> None:
        deadline = time.monotonic() + ABORT_LIMIT
        for thread in self._aborts:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._aborts):
            raise CarrierError(f"NCCL did not finish aborting a group within {ABORT_LIMIT:g} s")
        self._aborts.clear()

    def _make(self, peers: tuple[int, ...]) -> NcclCarrier:
        return NcclCarrier(
            self._worker, peers, self._rank, self._library, self._stream, self._aborts, self._unused
        )


class NcclCarrier(DataCarrier):
    # An abort ends the kernels of peers, too: they may take the contents of their buffers for the
    # sum.
    ends_cleanly = False

    def __init__(
        self,
        worker: Worker,
        peers: tuple[int, ...],
        rank: int,
        library: Any,
        stream: Any,
        aborts: list[threading.Thread],
        unused: list[bytes],
    ) -> None:
        super().__init__(worker, peers, rank)
        self._library, self._stream, self._aborts, self._unused = library, stream, aborts, unused
        self._address = b""  # offered by this rank, and not used yet
        self._comm: int | None = None
        self._inside = threading.Lock()  # held by the thread that is inside NCCL
        self._freeing = threading.Lock()
        self._freed = False
        self._abort_thread: threading.Thread | None = None

    def offer(self) -> bytes:
        if self.index == 0:
            self._address = self._unused.pop() if self._unused else bytes(self._library.new_id())
        return self._address

    def connect(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        address, self._address = offers[self.peers[0]], b""
        if len(address) != ID_BYTES:
            raise CarrierError("a member could not offer a carrier")
        with self._inside, self._stream.on_device():
            self._comm = self._library.begin_group(address, self.size, self.index)
        deadline = time.monotonic() + PATIENCE
        while not self._is_through():
            late = time.monotonic() > deadline
            if late or alarmed():
                self.free()
                if late:
                    raise TookTooLongError(f"NCCL: the group was not made after {PATIENCE:g} s")
                raise CarrierError("NCCL: the group was given up, a member died while it was made")
            time.sleep(0.001)

    def free(self) -> None:
        with self._freeing:
            if self._freed:
                return
            self._freed = True
            if self._address:  # the census failed on all members, so the next round can use the address
                self._unused.append(self._address)
            self._abort_thread = threading.Thread(target=self._abort, name="recover-nccl-abort", daemon=True)
            self._abort_thread.start()
            self._aborts.append(self._abort_thread)

    def retire(self) -> None:
        pass  # the members would wait for the abort

    def _abort(self) -> None:
        with self._inside, self._stream.on_device():
            if self._comm is not None:
                self._library.abort(self._comm)

    def follow(self, ready: Ready) -> None:
        for event in ready.events:
            self._stream.wait(event)

    def all_reduce(self, source: Data, out: Data) -> Completion | None:
        kind = wire_type(source)
        send = self._on_wire(source, kind)
        receive = send if out is source else self._room_for(out, send.shape, kind)
        operation = partial(
            self._library.all_reduce, send.data_ptr(), receive.data_ptr(), send.numel(), kind, SUM
        )
        return self._run(operation, send, [(receive, out)])

    def all_max(self, data: Data) -> Completion | None:
        wire = self._on_wire(data, "int32")
        operation = partial(
            self._library.all_reduce, wire.data_ptr(), wire.data_ptr(), wire.numel(), "int32", MAX
        )
        return self._run(operation, wire, [(wire, data)])

    def broadcast(self, data: Data, root: int) -> Completion | None:
        kind = wire_type(data)
        wire = self._on_wire(data, kind)
        operation = partial(self._library.broadcast, root, wire.data_ptr(), wire.numel(), kind)
        return self._run(operation, wire, [(wire, data)])

    def all_gather(self, source: Data, out: Data) -> Completion | None:
        kind = wire_type(source)
        send = self._on_wire(source, kind)
        receive = self._room_for(out, (self.size, *send.shape), kind)
        operation = partial(self._library.all_gather, send.data_ptr(), receive.data_ptr(), send.numel(), kind)
        return self._run(operation, send, [(receive, out)])

    def exchange(self, out: Mapping[int, Data], into: Mapping[int, Data]) -> Completion | None:
        send = {peer: self._on_wire(data, "int64") for peer, data in out.items()}
        receive = {peer: self._room_for(data, data.shape, "int64") for peer, data in into.items()}
        sent, received = (
            [(peer, wire.data_ptr(), wire.numel()) for peer, wire in wires.items()]
            for wires in (send, receive)
        )
        return self._run(
            lambda comm, stream: self._library.exchange(sent, received, "int64", comm, stream),
            [*send.values()],
            [(receive[peer], data) for peer, data in into.items()],
        )

    def barrier(self) -> Completion | None:
        word = torch.ones(1, dtype=torch.int32)
        return self.all_reduce(word, word)

    def holds(self, data: Data) -> bool:
        """Whether `data` are on a GPU."""
        return bool(self._stream.holds(data))

    def _on_wire(self, data: Data, kind: str) -> torch.Tensor:
        """The data themselves, or a copy that NCCL can send."""
        tensor = torch.as_tensor(data).detach()
        if self._is_direct(data, kind):
            return tensor
        wire: torch.Tensor = self._stream.new(tensor.shape, kind)
        self._stream.copy(wire, tensor)
        return wire

    def _room_for(self, out: Data, shape: tuple[int, ...], kind: str) -> torch.Tensor:
        """Where NCCL writes the result: `out` itself, or new memory if NCCL cannot write there."""
        room: torch.Tensor = out if self._is_direct(out, kind) else self._stream.new(shape, kind)
        return room

    def _is_direct(self, data: Data, kind: str) -> bool:
        """Whether NCCL can read and write these data in place."""
        return self._stream.holds(data) and data.is_contiguous() and str(data.dtype) == f"torch.{kind}"

    def _run(
        self, operation: Callable[..., None], kept: object, results: Sequence[tuple[torch.Tensor, Data]]
    ) -> Completion:
        """Enqueue an operation on the device.

        The completion waits for it, and copies results to the host. Once it has been enqueued, the
        end of the stream's work is the end of its kernel, whether it was aborted or not.

        `kept`: buffers that the device reads until then.
        """
        try:
            with self._inside:
                self._refuse_if_freed()
                with self._stream.on_device():
                    operation(self._comm, self._stream.handle)
            while not self._is_through():
                time.sleep(POLL)
        except CarrierError:
            self._give_up()
            raise
        targets = [(result, out, torch.as_tensor(out).detach()) for result, out in results]
        for result, out, target in targets:
            if self._stream.holds(out) and result.data_ptr() != target.data_ptr():
                self._stream.copy(target, result)
        passed = self._stream.record()

        def wait(keep: object = kept) -> None:
            passed.synchronize()
            try:
                self._is_through()
            except CarrierError:
                self.free()
                raise
            for result, out, target in targets:
                if not self._stream.holds(out):
                    self._stream.copy(target, result)
                    self._stream.record().synchronize()

        on_device = all(self._stream.holds(out) for _, out, _ in targets)
        return Completion(wait, passed if on_device else None)

    def _is_through(self) -> bool:
        """Whether the last call has been enqueued completely. Raises CarrierError."""
        self._refuse_if_freed()  # without waiting for the abort
        with self._inside:
            self._refuse_if_freed()
            return bool(self._library.is_through(self._comm))

    def _refuse_if_freed(self) -> None:
        if self._freed:
            raise CarrierError("the group was freed after a death")

    def _give_up(self) -> None:
        """After an operation that was not enqueued completely: return when no work of this group runs
        on the device, so that its buffers can be reused.

        A thread of NCCL's may still launch the kernel, until the abort has ended.
        """
        self.free()
        assert self._abort_thread is not None
        self._abort_thread.join()
        self._stream.record().synchronize()
