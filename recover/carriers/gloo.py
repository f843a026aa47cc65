"""The `gloo` carrier: torch's gloo over sockets that belong to the epoch, with a store hosted by a survivor.

It makes no MPI communicator, so nothing can crash in one. Its weakness is that a waiter whose own peers live
never hears of a death elsewhere, and that gloo's own abort does not wake it. So the group's sockets are known here: a
waiter is freed by shutting down duplicates of them. (Closing gloo's own descriptors would crash it.)
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recover.carriers.base import Array, DataCarrier, DataCarriers
from recover.carriers.contract import CarrierError
from recover.carriers.worker import Worker
from recover.fabrics.openmpi import OpenMPIFabric
from recover.job.grid import Grid
from recover.job.process import on_one_host

CONNECT_TIMEOUT = timedelta(seconds=20)
# A slow replica is not a dead one: whoever waits is freed by the watcher, not by gloo's clock.
OPERATION_TIMEOUT = timedelta(hours=12)


class GlooCarriers(DataCarriers):
    settle = 0.0  # nothing here minds a death while it is built

    def __init__(self, fabric: OpenMPIFabric, grid: Grid, worker: Worker) -> None:
        self._fabric, self._grid, self._worker = fabric, grid, worker

    def make(self, members: tuple[int, ...]) -> GlooCarrier:
        return GlooCarrier(self._fabric.rank, self._grid, self._worker, members)


class GlooCarrier(DataCarrier):
    def __init__(self, rank: int, grid: Grid, worker: Worker, members: tuple[int, ...]) -> None:
        super().__init__(worker, grid.peers(rank, members), rank)
        self._address = _own_address()
        self._before = _sockets()
        self._device = dist.ProcessGroupGloo.create_device(hostname=self._address, lazy_init=False)
        self._listener = _listening_port(self._before)
        self._store: dist.TCPStore | None = None
        self._group: Any = None
        self._lines: list[socket.socket] = []
        self._lock = threading.Lock()
        self._freed = False

    def offer(self) -> bytes:
        if self.index == 0:
            self._store = dist.TCPStore(
                self._address, 0, None, is_master=True, timeout=CONNECT_TIMEOUT, wait_for_workers=False
            )
        port = self._store.port if self._store else 0
        return json.dumps([self._address, port, self._listener]).encode()

    def connect(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        addresses = {rank: json.loads(offers[rank]) for rank in self.peers}
        ports = {port for _, _, port in addresses.values()}
        errors: list[Exception] = []

        def make() -> None:
            try:
                host, port, _ = addresses[self.peers[0]]
                store = self._store or dist.TCPStore(
                    host, port, None, is_master=False, timeout=CONNECT_TIMEOUT, wait_for_workers=False
                )
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._timeout = OPERATION_TIMEOUT
                options._devices = [self._device]
                group = dist.ProcessGroupGloo(
                    dist.PrefixStore("cross", store), self.index, self.size, options
                )
                self._store, self._group = store, group
            except Exception as error:
                errors.append(error)

        # On a thread of its own: if a peer dies just now, it is left behind to run into its error in peace.
        maker = threading.Thread(target=make, name="recover-gloo-connect", daemon=True)
        maker.start()
        while maker.is_alive():
            maker.join(0.001)
            if maker.is_alive() and alarmed():
                self._collect(ports)
                self.free()
                raise CarrierError("a member died while the group was made")
        if errors:
            self.free()
            raise CarrierError(f"gloo: {errors[0]}")
        self._collect(ports)
        if len(self._lines) != self.size - 1:
            self.free()
            raise CarrierError(f"gloo has {len(self._lines)} connections, {self.size - 1} were expected")

    def _collect(self, ports: set[int]) -> None:
        """Duplicates of the sockets that connect this rank to its peers: by shutting them down it is freed."""
        lines = []
        for descriptor, name in _sockets().items():
            if self._before.get(descriptor) == name:
                continue
            try:
                line = socket.socket(fileno=os.dup(descriptor))
            except OSError:
                continue
            try:
                if line.family not in (socket.AF_INET, socket.AF_INET6):
                    raise OSError("not a network socket")
                mine, theirs = line.getsockname()[1], line.getpeername()[1]
            except OSError:
                line.close()
                continue
            if mine == self._listener or theirs in ports:
                lines.append(line)
            else:
                line.close()
        with self._lock:
            self._lines = lines

    def free(self) -> None:
        with self._lock:
            self._freed = True
            for line in self._lines:
                try:
                    line.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # already gone
                line.close()
            self._lines = []

    def all_reduce(self, source: Array, out: Array) -> None:
        if source is not out:
            out[...] = source
        tensor = torch.from_numpy(out)
        self._call(lambda: self._group.allreduce([tensor]))

    def broadcast(self, data: Array, root: int) -> None:
        tensor = torch.from_numpy(data)
        self._call(lambda: self._group.broadcast(tensor, root))

    def all_gather(self, source: Array, out: Array) -> None:
        tensor, rows = torch.from_numpy(source), list(torch.from_numpy(out))
        self._call(lambda: self._group.allgather([rows], [tensor]))

    def barrier(self) -> None:
        self._call(lambda: self._group.barrier())

    def _call(self, operation: Callable[[], Any]) -> None:
        if self._freed:
            raise CarrierError("the group was freed after a death")
        try:
            operation().wait()
        except RuntimeError as error:
            self.free()
            raise CarrierError(f"gloo: {error}") from None


def _own_address() -> str:
    """Where the other ranks reach this one: the loopback if all are on this host."""
    if on_one_host():
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())


def _sockets() -> dict[int, str]:
    """This process's sockets: descriptor to kernel name."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found[int(entry)] = target
    return found


def _listening_port(before: dict[int, str]) -> int:
    """The port of the listener that has appeared since `before`."""
    for descriptor, name in _sockets().items():
        if before.get(descriptor) == name:
            continue
        try:
            with socket.socket(fileno=os.dup(descriptor)) as candidate:
                network = candidate.family in (socket.AF_INET, socket.AF_INET6)
                if network and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return int(candidate.getsockname()[1])
        except OSError:
            continue
    raise CarrierError("gloo opened no listening socket")
