"""`recover.init()`: makes a process that a launcher has started a rank of the world.

The one place where the parts of a world are chosen and assembled: job, fabric, carriers, the board
of this host, hooks of fault schedules.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recover.job import process
from recover.job.environment import write_changes
from recover.job.grid import Grid
from recover.job.record_files import FILES
from recover.job.spec import EtcdAccess, JobSpec, current_job
from recover.launch.foreign_mpirun import make_shared_directory
from recover.world import rank_exit
from recover.world.carriers import choose
from recover.world.carriers.worker import Worker
from recover.world.fabrics.base import Fabric
from recover.world.hooks import Hooks, NoHooks
from recover.world.interfaces import WorldParts
from recover.world.liveness import other_hosts
from recover.world.liveness.board import Board
from recover.world.slot_notes import Notes, RunNotes
from recover.world.world import World

if TYPE_CHECKING:
    from recover.world.fabrics.etcd.client import EtcdClient

_current: World | None = None
_LOOK = 0.5  # seconds between two looks for the file by which the agent says that etcd is lost


def init(replica_size: int | None = None, carrier: str | None = None) -> World:
    """Join the world. Call it once, early, in a script started by `recover run` (or by a
    fault-tolerant mpirun).

    On several hosts, started by `recover run --nnodes`, the world stands on etcd; otherwise on Open
    MPI. Without a launcher, as in `python train.py`, the world is this process alone.

    `replica_size`: ranks per replica; by default what `recover run --replica-size` says, else 1.
    `carrier`: what moves the data between replicas: `mpi`, `gloo`, `nccl` or `auto`; by default what
    `--carrier` says.
    """
    global _current
    if _current is not None:
        _refuse_another(_current, replica_size, carrier)
        return _current
    launched = current_job()
    job = launched or _lone_job()
    job = replace(job, replica_size=replica_size or job.replica_size, carrier=carrier or job.carrier)
    if launched is None or job.is_alone:
        _current = _alone(job)
    else:
        rank_exit.install_hooks(standalone=True)
        _current = _on_open_mpi(job) if job.etcd is None else _on_etcd(job, job.etcd)
    return _current


def _on_open_mpi(job: JobSpec) -> World:
    from recover.world.fabrics.openmpi import OpenMPIFabric, start_mpi

    ranks = start_mpi()
    job = replace(job, ranks=job.ranks or ranks)
    grid = Grid.of(job.ranks, job.replica_size)
    place = Path(job.session) if job.session else make_shared_directory()
    board = Board(place / "board", job.ranks)
    fabric = OpenMPIFabric(board)
    board.claim(fabric.rank)
    notes = RunNotes(job.run_dir, fabric.rank)
    world = World(job, grid, _parts(job, grid, fabric, board, notes))
    if job.session is None:
        # Making the world takes an agreement of all ranks, so those of this host have opened the
        # board by now.
        shutil.rmtree(place, ignore_errors=True)
    return world


def _lone_job() -> JobSpec:
    """The job of a process without a launcher: from the same variables as under a foreign
    mpirun."""
    if name := process.foreign_launcher():
        raise RuntimeError(
            f"{name} is {os.environ[name]}, so this process is one of several that {process.FOREIGN[name]} has "
            f"started, and each would be a world of its own; start it with `recover run -n {os.environ[name]} SCRIPT` "
            f"instead, or unset {name} if it means something else"
        )
    script = Path(sys.argv[0]).name if sys.argv[0].endswith(".py") else "SCRIPT"
    print(
        f"recover: no launcher has started this process: it is a world of one "
        f"(`recover run -n RANKS {script}` starts several)",
        file=sys.stderr,
        flush=True,
    )
    return replace(JobSpec.from_environment(os.environ), ranks=1)


def _alone(job: JobSpec) -> World:
    """A world of one rank. No other rank waits for it, so an exception ends it as in any script."""
    from recover.world.fabrics.lone import LoneFabric

    grid = Grid.of(1, job.replica_size)
    with tempfile.TemporaryDirectory(prefix="recover-") as place:
        board = Board(Path(job.session or place, "board"), 1)
    board.claim(0)
    world = World(job, grid, _parts(job, grid, LoneFabric(board), board, RunNotes(job.run_dir, 0)))
    rank_exit.close_at_exit()
    return world


def _on_etcd(job: JobSpec, access: EtcdAccess) -> World:
    from recover.launch.job_code import JobCode
    from recover.world.fabrics.etcd.access import LOST, client_of
    from recover.world.fabrics.etcd.fabric import EtcdFabric
    from recover.world.fabrics.etcd.host_lease import parts_of
    from recover.world.fabrics.etcd.slot_notes import EtcdNotes

    me = process.rank()
    assert me is not None
    assert job.session is not None
    grid = Grid.of(job.ranks, job.replica_size)
    board = Board(Path(job.session, "board"), job.board_size)
    board.claim(me)
    client = client_of(access)
    fabric = EtcdFabric(
        client,
        me,
        job.ranks,
        board,
        job.token,
        job.host,
        grace=parts_of(job.lease)[1],
        replica_size=job.replica_size,
        address=job.address or "127.0.0.1",
        limit=job.limit,
        admits=job.admits,
    )
    if job.room and not job.joining and process.given_environment is not None:
        try:
            write_changes(Path(job.session), process.given_environment)
        except OSError as error:  # no memory: no process is prewarmed
            rank_exit.log(
                f"the changes of the environment could not be written for prewarmed processes: {error}"
            )
    notes = EtcdNotes(client, me, RunNotes(job.run_dir, me))
    lost = Path(job.session, LOST)
    threading.Thread(target=_give_up_with, args=[lost, client], name="recover-etcd-lost", daemon=True).start()
    parts = _parts(job, grid, fabric, board, notes)
    code = JobCode(client, Path(job.session)) if job.room else None
    return World(
        job, grid, replace(parts, remote_rows=partial(other_hosts.rows, Path(job.session)), code=code)
    )


def _give_up_with(lost: Path, client: EtcdClient) -> None:
    """Once the agent of this host says that etcd is lost, stop waiting for answers of etcd and for
    data."""
    while not lost.exists():
        time.sleep(_LOOK)
    client.give_up()
    if _current is not None:
        _current.abort_collectives("etcd is lost")


def _parts(job: JobSpec, grid: Grid, fabric: Fabric, board: Board, notes: Notes) -> WorldParts:
    worker = Worker()
    # A rank that waits for the disk at its end does not hang.
    FILES.while_waiting = partial(board.accomplish, fabric.rank)
    hooks: Hooks = NoHooks()
    if job.faults:
        from recover.faults.fault import parse_faults
        from recover.faults.probe import Probe
        from recover.faults.schedule import check_schedule

        faults = parse_faults(job.faults)
        check_schedule(faults, grid.replicas, grid.replica_size, later=job.room // job.replica_size)
        hooks = Probe(grid.replica(fabric.rank), grid.shard(fabric.rank), faults)
    if alone := grid.ranks == 1 and job.etcd is None:
        from recover.world.carriers.lone import LoneCarriers
    return WorldParts(
        fabric=fabric,
        liveness=board,
        hooks=hooks,
        worker=worker,
        carriers=LoneCarriers(worker)
        if alone
        else choose(
            job.carrier, fabric, grid, worker, job.etcd is None, job.address, job.link_timeout, job.token
        ),
        own=rank_exit.RANK_EXIT,
        notes=notes,
        watch=lambda watcher: None if alone else watcher.start(),
        drop=_drop_beside,
    )


def _drop_beside(held: list[Any]) -> None:
    """Drop objects on a thread of their own: freeing a group of gloo's waits for its threads, for
    ten milliseconds and more."""
    if held:
        threading.Thread(target=held.clear, name="recover-drop", daemon=True).start()


def _refuse_another(world: World, replica_size: int | None, carrier: str | None) -> None:
    """A process has one world: `init()` again returns it, and raises ValueError if it is asked for
    another one."""
    for name, asked, there in (
        ("replica_size", replica_size, world.job.replica_size),
        ("carrier", carrier, world.job.carrier),
    ):
        if asked is not None and asked != there:
            raise ValueError(
                f"recover.init({name}={asked!r}) was called in a world with {name}={there!r}; "
                "give it in the first call, or leave it out"
            )
