"""The `mpi` carrier: Open MPI's collectives on a communicator that is made for the epoch.

Open MPI crashes healthy ranks when a death is noticed inside a communicator constructor, or when a
rank revokes a communicator that is half built on another rank. Two rules prevent both: constructors
run only after no new death was noticed for a while (`settle`), and no rank revokes a communicator
before an agreement has confirmed that all members have it. Communicators are never freed: freeing
is a collective, and some members are dead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

from mpi4py import MPI

from recover.job.grid import Grid
from recover.world.carriers.base import Array, DataCarriers
from recover.world.carriers.contract import CarrierError
from recover.world.carriers.host_memory import HostCarrier, StagingByDevice
from recover.world.carriers.worker import Worker
from recover.world.fabrics.openmpi import OpenMPIFabric

# A piece fits the cache, so that summing does not wait for memory. A large buffer at once was
# slower.
PIECE = 4 << 20


class MpiCarriers(DataCarriers):
    settle = 0.06

    def __init__(self, fabric: OpenMPIFabric, grid: Grid, worker: Worker) -> None:
        self._fabric, self._grid, self._worker = fabric, grid, worker
        self._staging = StagingByDevice()
        self._made = 0

    def make(self, members: tuple[int, ...]) -> MpiCarrier:
        self._made += 1  # the same on all members: they make carriers after the same agreements
        return MpiCarrier(self._fabric, self._grid, self._worker, members, self._staging, self._made << 32)


class MpiCarrier(HostCarrier):
    def __init__(
        self,
        fabric: OpenMPIFabric,
        grid: Grid,
        worker: Worker,
        members: tuple[int, ...],
        staging: StagingByDevice,
        first_operation: int,
    ) -> None:
        super().__init__(worker, grid.peers(fabric.rank, members), fabric.rank, staging)
        self._fabric, self._grid = fabric, grid
        self._confirmed: list[MPI.Comm] = []
        self._lock = threading.Lock()
        self._freed = False
        self._operation = first_operation
        self._pieces = 0

    @property
    def carried(self) -> int:
        return self._pieces

    @property
    def _comm(self) -> MPI.Comm:
        return self._confirmed[-1]

    def offer(self) -> bytes:
        return b""

    def connect(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        self._construct(self._fabric.comm.Shrink, confirm)
        if self._grid.replica_size > 1:
            shard, rank = self._grid.shard(self._fabric.rank), self._fabric.rank
            everyone = self._comm
            self._construct(lambda: everyone.Split(shard, rank), confirm)

    def _construct(self, constructor: Callable[[], MPI.Comm], confirm: Callable[[bool], bool]) -> None:
        comm = None
        try:
            comm = constructor()
            comm.Set_errhandler(MPI.ERRORS_RETURN)
        except MPI.Exception:
            self.free()  # wakes members that are blocked in this constructor, on the communicator before it
        if not confirm(comm is not None):
            raise CarrierError("a communicator could not be made everywhere")
        assert comm is not None
        with self._lock:
            self._confirmed.append(comm)
            if self._freed:
                comm.Revoke()

    def free(self) -> None:
        with self._lock:
            if self._freed:
                return
            self._freed = True
            for comm in self._confirmed:
                try:
                    comm.Revoke()
                except MPI.Exception:
                    pass  # revoking is best effort; the vote does not depend on it

    def sum(self, source: Array, out: Array) -> None:
        in_place = source is out
        source, out = source.reshape(-1), out.reshape(-1)
        for start in range(0, out.size, PIECE // out.itemsize):
            piece = slice(start, start + PIECE // out.itemsize)
            send = MPI.IN_PLACE if in_place else source[piece]
            self._call(partial(self._comm.Allreduce, send, out[piece], op=MPI.SUM))
            self._pieces += 1

    def maximum(self, data: Array) -> None:
        self._call(partial(self._comm.Allreduce, MPI.IN_PLACE, data, op=MPI.MAX))

    def copy_from(self, data: Array, root: int) -> None:
        self._call(partial(self._comm.Bcast, data, root=root))

    def gather(self, source: Array, out: Array) -> None:
        self._call(partial(self._comm.Allgather, source, out))

    def swap(self, out: Mapping[int, Array], into: Mapping[int, Array]) -> None:
        def run() -> None:
            requests = [self._comm.Isend(data, dest=peer) for peer, data in out.items()]
            requests += [self._comm.Irecv(data, source=peer) for peer, data in into.items()]
            MPI.Request.Waitall(requests)

        self._call(run)

    def meet(self) -> None:
        self._call(self._comm.Barrier)

    def arrive(self) -> None:
        """Wait for the peers without spinning.

        In a group that is freed meanwhile the operation then fails at once.
        """
        self._operation += 1
        operation, board = self._operation, self._fabric.board
        board.arrive(self._fabric.rank, operation)
        self._fabric.doze_until(
            lambda rank: board.arrived(rank) >= operation,
            self.peers,
            lambda: self.peers if self._freed or self._comm.Is_revoked() else (),
        )

    def _call(self, operation: Callable[[], object]) -> None:
        try:
            operation()
        except MPI.Exception as error:
            self.free()
            raise CarrierError(f"MPI: {error}") from None
