"""The program of `recover doctor` on three ranks: one kills itself, the others must notice it and
go on."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from pathlib import Path

import mpi4py

mpi4py.rc.thread_level = "multiple"
mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402  (initialises, with the settings above)


def main() -> None:
    world, directory = MPI.COMM_WORLD, Path(os.environ["RECOVER_RUN_DIR"])
    world.Set_errhandler(MPI.ERRORS_RETURN)
    report: dict[str, object] = {
        "library": MPI.Get_library_version().partition(",")[0],
        "enabled": ctypes.c_bool.in_dll(ctypes.CDLL(MPI.__file__), "ompi_ftmpi_enabled").value,
        "threads": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
    }
    if report["enabled"]:  # otherwise a death would end all ranks
        report |= _lose_one(world, directory / "killed")
    if world.rank == 0:
        (directory / "probe.json").write_text(json.dumps(report))


def _lose_one(world: MPI.Intracomm, killed: Path) -> dict[str, object]:
    world.Barrier()
    if world.rank == 2:
        killed.write_text(str(time.monotonic()))  # all processes of a host share this clock
        os.kill(os.getpid(), signal.SIGKILL)
    while not _agreed_on_a_death(world):
        pass
    elapsed = time.monotonic() - float(killed.read_text())
    other = 1 - world.rank
    heard = world.sendrecv(world.rank, dest=other, source=other)
    return {
        "survivors": world.size - world.Get_failed().Get_size(),
        "going_on": heard == other,
        "milliseconds": 1000 * elapsed,
    }


def _agreed_on_a_death(world: MPI.Intracomm) -> bool:
    """An agreement raises after a death, until the death is acknowledged."""
    try:
        world.Agree(1)
    except MPI.Exception:
        world.Ack_failed()
        return False
    return world.Get_failed().Get_size() > 0


if __name__ == "__main__":
    main()
