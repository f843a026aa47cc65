"""The program of every rank: `python -P -m recover.launch.bootstrap SCRIPT ARGS`, or `... -m MODULE
ARGS`.

It makes the process end with its launcher, claims its row of the board, and runs the script as
`python SCRIPT ARGS` (or `python -m MODULE ARGS`) does. However the script ends, the process ends as
`recover.world.rank_exit` says.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from recover.job import code, process
from recover.job.spec import current_job
from recover.launch import rank_outputs, trainers
from recover.world import rank_exit

_PR_SET_PDEATHSIG = 1
_explained_debuggers = False


def main() -> None:
    die_with_parent()
    _take_output()
    rank_exit.install_hooks()
    if (job := current_job()) is not None and job.leaves:
        leave_sigterm_to_the_agent()
    _join()
    for stream in (sys.stdout, sys.stderr):  # printed lines of a killed rank must not be lost in a buffer
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = sys.argv[1:]
    script = ""
    process.set_local_rank()
    process.given_environment = dict(os.environ)
    process.given_command, process.given_directory = tuple(sys.argv), os.getcwd()
    _record_code()
    if process.rank() == 0:
        trainers.watch()
    try:
        module, compiled = _find_module() if sys.argv[0] == "-m" else _find_script()
        script = sys.argv[0]
        try:
            sys.modules["__main__"] = module
            exec(compiled, module.__dict__)
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
        _tell_without_step(script)
        rank_exit.close()
    except BaseException as error:
        if not rank_exit.is_rank():
            raise  # a process that the script forked
        sys.stdout.flush()
        rank_exit.die_of_exception(error, _script_frames(error.__traceback__, script))
    # Returning lets the interpreter join threads and run the script's atexit functions; ours comes
    # last.


def _find_script() -> tuple[ModuleType, CodeType]:
    """Find the script as the interpreter does. Unlike with `runpy`, `__main__` stays the script's
    for threads and atexit."""
    script = os.path.abspath(sys.argv[0])
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    content = Path(script).read_bytes()
    code.record_file(os.path.basename(script), Path(script), content)
    compiled = compile(content, script, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    module.__file__ = sys.argv[0] = script
    return module, compiled


def _find_module() -> tuple[ModuleType, CodeType]:
    """Find a module, or the `__main__` of a package, from the current directory, as `python -m` does."""
    name = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    compiled = getattr(spec and spec.loader, "get_code", lambda _: None)(spec and spec.name)
    if spec is None or compiled is None:
        raise ImportError(
            f"-m {name}: there is no module of that name that can be run; looked from {os.getcwd()}"
        )
    module = ModuleType("__main__")
    module.__file__ = sys.argv[0] = compiled.co_filename
    module.__spec__, module.__package__, module.__loader__ = spec, spec.parent, spec.loader
    return module, compiled


def _record_code() -> None:
    """Record the code that this rank loads, where replicas may join: theirs must be the same."""
    job = current_job()
    if job is not None and job.room:
        code.record()


def _take_output() -> None:
    """Write to the pipes that the launcher made for this rank. A single rank has the launcher's own
    terminal."""
    rank, job = process.rank(), current_job()
    if rank is None or job is None or job.session is None:
        return
    if job.is_alone:
        rank_exit.omit_rank_prefix()
        return
    if rank_outputs.take(Path(job.session), rank):
        rank_exit.omit_rank_prefix()
    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = _no_debugger


def _no_debugger(*_: object, **__: object) -> None:
    """Say, once, how to debug: several ranks have no terminal, and all would wait for a rank that
    waits at a prompt."""
    global _explained_debuggers
    if _explained_debuggers:
        return
    _explained_debuggers = True
    script = Path(sys.argv[0]).name
    print(
        f"recover: breakpoint() is left out, for {script} runs on several ranks, which have no terminal. With one rank "
        f"it works: `recover run -n 1 {script}`, or `python {script}`. With several, set PYTHONBREAKPOINT to a "
        "debugger that is reached from outside (debugpy, rpdb)",
        file=sys.stderr,
    )


def _tell_without_step(script: str) -> None:
    world = getattr(sys.modules.get("recover.launch.init"), "_current", None)
    job = current_job()
    if job is None or not job.records or process.rank() != 0:
        return
    name = Path(script).name
    if world is None:
        print(
            f"recover: {name} has ended and never called recover.init(): its {job.ranks} rank(s) knew nothing of each "
            "other, and no death would have been repaired",
            file=sys.stderr,
        )
    elif not world.steps_made and not world.has_agreed:
        print(
            f"recover: {name} has ended and made no recover.Step: each of its {job.ranks} rank(s) ran by itself, and "
            "what they trained was summed over nobody; docs/guides/porting.md says how to take steps",
            file=sys.stderr,
        )


def _script_frames(trace: TracebackType | None, script: str) -> TracebackType | None:
    """The traceback as `python SCRIPT` shows it, without our frames above the script's."""
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace


def leave_sigterm_to_the_agent() -> None:
    """Ignore SIGTERM where it asks the host to leave.

    Schedulers that take a host away send it to all processes of a job. The agent then lets its ranks leave
    after their step; a rank that died of it would cost the others that step's work. A handler, not SIG_IGN,
    which programs that a rank starts would inherit; children that it forks are ended by SIGTERM as usual.
    """
    ignore = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGTERM, ignore)

    def restore() -> None:
        if signal.getsignal(signal.SIGTERM) is ignore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=restore)


def die_with_parent() -> None:
    """Be killed when the parent ends. Ranks have a process group of their own, and would outlive a
    killed mpirun."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the request took effect
        os.kill(os.getpid(), signal.SIGKILL)


def _join() -> None:
    """Claim the row of the board, and start MPI before the script: MPI needs every rank at its
    start, and any of them may die afterwards. On etcd a rank may be missing from the start."""
    from recover.world.liveness.board import Board

    rank, job = process.rank(), current_job()
    if rank is None or job is None:
        return
    process.set_process_name(rank)
    board = Board(Path(job.session, "board"), job.board_size) if job.session else None
    if board is not None:
        board.claim(rank)
    if not job.is_alone and job.etcd is None:
        from recover.world.fabrics.openmpi import start_mpi

        try:
            start_mpi()
        except Exception as error:
            rank_exit.die_of_exception(error)
        process.hide_mpi_variables()
    if board is not None:
        board.join(rank)


if __name__ == "__main__":
    main()
