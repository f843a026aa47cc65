"""`recover.init()`: from a process that a launcher has started to a rank of the world.

The one place where the parts of a world are chosen and put together: what the job was told, the fabric, the board of
this host, and the faults that are to strike.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

from recover.carriers import choose
from recover.carriers.worker import Worker
from recover.fabrics.openmpi import OpenMPIFabric, start_mpi
from recover.job.grid import Grid
from recover.job.spec import JobSpec, told
from recover.launch.meeting_place import make_meeting_place
from recover.liveness.board import Board
from recover.world import ending
from recover.world.hooks import Hooks, NoHooks
from recover.world.notes import RunNotes
from recover.world.seams import Own, Parts
from recover.world.world import World

_current: World | None = None


def init(replica_size: int | None = None, carrier: str | None = None) -> World:
    """Join the world. Call it once, early, in a script started by `recover run` (or by a fault-tolerant mpirun).

    `replica_size`: ranks per replica; by default what `recover run --replica-size` says, else 1.
    `carrier`: what moves the data between replicas: `mpi`, `gloo`, or `auto`; by default what `--carrier` says.
    """
    global _current
    job = told()
    if job is None:
        raise RuntimeError(
            "recover.init() was called in a process that no mpirun has started; "
            "start the script with `recover run -n RANKS SCRIPT`"
        )
    if _current is not None:
        _refuse_another(_current, replica_size, carrier)
        return _current
    ending.install_hooks(standalone=True)
    ranks = start_mpi()
    job = replace(
        job,
        ranks=job.ranks or ranks,
        replica_size=replica_size or job.replica_size,
        carrier=carrier or job.carrier,
    )
    grid = Grid.of(job.ranks, job.replica_size)
    place = Path(job.session) if job.session else make_meeting_place()
    board = Board(place / "board", job.ranks)
    fabric = OpenMPIFabric(board)
    board.claim(fabric.rank)
    _current = World(job, grid, _parts(job, grid, fabric, board))
    if job.session is None:
        # All ranks have agreed on something, so all of this host have the board, and nobody needs its name any more.
        shutil.rmtree(place, ignore_errors=True)
    return _current


def _parts(job: JobSpec, grid: Grid, fabric: OpenMPIFabric, board: Board) -> Parts:
    worker = Worker()
    hooks: Hooks = NoHooks()
    if job.faults:
        from recover.faults.fault import parse_faults
        from recover.faults.probe import Probe

        hooks = Probe(grid.replica(fabric.rank), grid.shard(fabric.rank), parse_faults(job.faults))
    return Parts(
        fabric=fabric,
        liveness=board,
        hooks=hooks,
        worker=worker,
        carriers=choose(job.carrier, fabric, grid, worker),
        own=cast(Own, ending),  # a module, whose functions are what is asked for
        notes=RunNotes(job.run_dir, fabric.rank),
        watch=lambda watcher: watcher.start(),
    )


def _refuse_another(world: World, replica_size: int | None, carrier: str | None) -> None:
    """A process has one world: asking again gives the same one, asking for another one is a mistake."""
    for name, asked, there in (
        ("replica_size", replica_size, world.job.replica_size),
        ("carrier", carrier, world.job.carrier),
    ):
        if asked is not None and asked != there:
            raise ValueError(
                f"recover.init({name}={asked!r}) was called in a world with {name}={there!r}; "
                "give it in the first call, or leave it out"
            )
