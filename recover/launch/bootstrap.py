"""What every rank runs: `python -P -m recover.launch.bootstrap SCRIPT ARGS`.

It ties the process to its launcher, tells the board its pid, and runs the script as `python SCRIPT ARGS`
would, so that every way out of it ends as `recover.world.ending` says.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from types import ModuleType, TracebackType

from recover.job import process
from recover.job.spec import told
from recover.world import ending

_PR_SET_PDEATHSIG = 1


def main() -> None:
    _die_with_parent()
    ending.install_hooks()
    _join()
    for stream in (sys.stdout, sys.stderr):  # a killed rank must not take a block of printed lines with it
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = sys.argv[1:]
    script = os.path.abspath(sys.argv[0])
    try:
        try:
            _run(script)
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
        ending.close()
    except BaseException as error:
        if not ending.is_rank():
            raise  # in a process that the script forked: none of our business
        sys.stdout.flush()
        ending.die_of(error, _script_frames(error.__traceback__, script))
    # Returning lets the interpreter join threads and run the script's atexit functions; ours comes last.


def _run(script: str) -> None:
    """As the interpreter does it; unlike `runpy`, `__main__` stays the script's for threads and atexit."""
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    module = ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), module.__dict__)


def _script_frames(trace: TracebackType | None, script: str) -> TracebackType | None:
    """The traceback as plain `python SCRIPT` would show it, without our frames above the script's."""
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace


def _die_with_parent() -> None:
    """Ranks have a process group of their own: without this they outlive a killed mpirun."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked to be told
        os.kill(os.getpid(), signal.SIGKILL)


def _join() -> None:
    """Start MPI before the script: its start-up needs every rank, and from then on any of them may die."""
    from recover.liveness.board import Board

    rank, job = process.rank(), told()
    if rank is None or job is None or job.session is None:
        return
    board = Board(Path(job.session, "board"), job.ranks)
    board.claim(rank)
    from recover.fabrics.openmpi import start_mpi

    try:
        start_mpi()
    except Exception as error:
        ending.die_of(error)
    board.join(rank)


if __name__ == "__main__":
    main()
