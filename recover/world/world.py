"""The world as a training step sees it: who is left, one agreement over all of them, repair, and the cross group."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recover.carriers import DataCarrier, choose
from recover.carriers.worker import Worker
from recover.fabrics.openmpi import OpenMPIFabric, start_mpi
from recover.faults.fault import parse_faults
from recover.faults.probe import KILLS_VARIABLE, Probe
from recover.job.grid import Grid
from recover.liveness.board import Board
from recover.world import ending
from recover.world.cross import CrossGroup
from recover.world.membership import Census, ExcludedError, Membership
from recover.world.watchdog import LIMIT_VARIABLE, HangWatchdog, read_limit
from recover.world.watcher import Watcher

LINGER = 5.0  # seconds; longer than it takes a rank that an agreement has forgotten to give itself up
MATE_PATIENCE = 2.0  # seconds; a death is noticed within 60 ms, on busy cores later

_current: World | None = None


class World:
    """All ranks of the job, of which any may die at any moment. Get it from `recover.init()`."""

    def __init__(self, grid: Grid, fabric: OpenMPIFabric, board: Board, carrier: str) -> None:
        self.grid = grid
        self.rank = fabric.rank
        self.replica = grid.replica(fabric.rank)
        self.shard = grid.shard(fabric.rank)
        self.board = board
        self.probe = Probe(self.replica, self.shard, parse_faults(os.environ.get(KILLS_VARIABLE, "").split()))
        self.worker = Worker()
        self.noticed_at: float | None = None  # when this rank first knew of a death that is not repaired yet
        self._fabric = fabric
        self._membership: Membership[DataCarrier] = Membership(
            fabric, grid, choose(carrier, fabric, grid, self.worker), self.probe, ending.log
        )
        self._cross: CrossGroup | None = None
        self._waiting = 0  # how many calls deep this rank is in a wait for others
        self._hangs = HangWatchdog(read_limit(os.environ.get(LIMIT_VARIABLE)))
        self._watcher = Watcher(fabric, grid, board, self._hangs, self._on_death, self._waits)
        self.last_census = self.repair(b"")  # start-up is the first pass of the repair loop
        ending.on_success(self._close)
        ending.on_raise(self._look_for_a_dead_mate)

    @property
    def members(self) -> tuple[int, ...]:
        """The living ranks, as last agreed."""
        return self._membership.members

    @property
    def replicas(self) -> tuple[int, ...]:
        """The living replicas, as last agreed."""
        return self.grid.replicas_of(self.members)

    @property
    def epoch(self) -> int:
        """The world epoch: 1 after start-up, one more at every repair."""
        return self._membership.epoch

    @property
    def cross(self) -> CrossGroup:
        """This rank's cross-replica group in this epoch: the same shard in every living replica."""
        assert self._cross is not None
        return self._cross

    def agree(self, word: int = 1) -> int | None:
        """The bitwise AND of everyone's word, the same on all survivors: the only commit point there is.

        None if somebody died: then every survivor gets None, and must call `repair`.
        """
        with self._waits_here():
            self.cross.drain()
            with self._fabric.lock:
                agreed = self._membership.agree(word)
        if agreed is None and self.noticed_at is None:
            self.noticed_at = time.time()
        return agreed

    def repair(self, record: bytes = b"", evict: frozenset[int] = frozenset()) -> Census:
        """Agree on who is left and exchange one record each; afterwards `cross` is a new group.

        A rank that the others go on without (it lost a mate of its replica, or is in `evict`) does not return from
        this: it leaves in a way that they see.
        """
        if self._cross is not None:
            self._cross.break_off()
            self._cross.drain()
        with self._waits_here(), self._fabric.lock:
            try:
                census = self._membership.repair(record, evict)
            except ExcludedError as excluded:
                how = ending.End.ORPHAN if excluded.orphan else ending.End.EXCLUDED
                ending.die(how, str(excluded))
            assert self._membership.carrier is not None
            self._cross = CrossGroup(self._membership.carrier, self.worker)
        self.board.touch(self.rank)
        self.last_census = census
        self.noticed_at = None
        return census

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Inside, this rank owes the others its part of a step: there is a limit to how long it may do nothing."""
        started, epoch = time.monotonic(), self.epoch
        self.board.in_step(self.rank, number)
        try:
            yield
            if (
                self.epoch == epoch
            ):  # one that somebody was lost in, or waited for in vain, says nothing of the next
                self._hangs.committed(time.monotonic() - started)
        finally:
            self.board.in_step(self.rank, 0)

    @contextmanager
    def _waits_here(self) -> Iterator[None]:
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def _waits(self) -> bool:
        """Whether this rank waits for others: in an agreement or a repair, or for a reduction."""
        return bool(self._waiting) or self.worker.busy

    def _on_death(self, failed: frozenset[int]) -> None:
        """Called by the watcher, with the fabric's lock held, so never in the middle of a repair."""
        if self._cross is not None and not failed.isdisjoint(self.members):
            self.noticed_at = self.noticed_at or time.time()
            self._cross.break_off()

    def _look_for_a_dead_mate(self, error: BaseException) -> None:
        """Gloo and NCCL raise when a mate dies. Give the watcher a moment to see it and end this rank as an orphan."""
        deadline = time.monotonic() + MATE_PATIENCE
        while self.grid.replica_size > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
            if self._fabric.failed() & self.grid.mates(self.rank):
                time.sleep(MATE_PATIENCE)  # the watcher ends this rank now

    def _close(self) -> None:
        """The closing agreement: nobody leaves before all survivors are through, whoever dies meanwhile."""
        while self.agree(1) is None:
            self.repair()
        with self._waits_here():  # one that hangs here is fenced, or it would be left behind
            self._fabric.linger(LINGER + self._hangs.silent_limit)


def init(replica_size: int | None = None, carrier: str = "auto") -> World:
    """Join the world. Call it once, early, in a script started by `recover run` (or by a fault-tolerant mpirun).

    `replica_size`: ranks per replica; by default what `recover run --replica-size` says, else 1.
    `carrier`: what moves the data between replicas: `mpi`, `gloo`, or `auto`.
    """
    global _current
    if _current is not None:
        return _current
    if ending.rank_from_environment() is None:
        raise RuntimeError(
            "recover.init() was called in a process that no mpirun has started; "
            "start the script with `recover run -n RANKS SCRIPT`"
        )
    ending.install_hooks(standalone=True)
    start_mpi()
    ranks = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    grid = Grid.of(ranks, replica_size or int(os.environ.get("RECOVER_REPLICA_SIZE", "1")))
    board = Board(_board_path(), ranks)
    if "RECOVER_SESSION" not in os.environ:  # nobody else cleans up; runs after the closing agreement
        ending.on_success(lambda: shutil.rmtree(_board_path().parent, ignore_errors=True))
    fabric = OpenMPIFabric(board)
    board.claim(fabric.rank)
    _current = World(grid, fabric, board, carrier)
    return _current


def _board_path() -> Path:
    """In the launcher's session; without one, in shared memory under the job's own name."""
    session = os.environ.get("RECOVER_SESSION")
    if session is None:
        base = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())
        session = str(base / f"recover-{os.environ.get('PMIX_NAMESPACE', 'job')}".replace("@", "-"))
    Path(session).mkdir(mode=0o700, parents=True, exist_ok=True)
    return Path(session, "board")
