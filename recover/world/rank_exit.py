"""How a rank ends: with a marker that says how, and in a way that the other ranks see.

The others see SIGKILL within milliseconds and never see `exit(1)`. So a rank either succeeds (closing
callbacks, marker, exit 0 without MPI_Finalize, which can hang after a failure) or writes down why not
and kills itself. The launcher's verdict is read from the markers:

    <run dir>/ranks/<rank>.log     time-stamped lines, tracebacks included
    <run dir>/ranks/<rank>.end     JSON: end, detail, time, and of an exception kind, place and whether it is ordinary;
                                   absent if the rank was killed from outside
    <run dir>/ranks/<rank>.stack   stacks of all threads, on SIGUSR2 and on a crash in native code
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

from recover.job import process
from recover.job.record_files import FILES
from recover.job.spec import current_job


class End(StrEnum):
    """The ways in which a rank says that it ended."""

    DONE = "done"  # the script ran to its end
    RAISED = "raised"  # an exception in any thread, or an exit code other than 0
    ORPHAN = "orphan"  # another rank of its replica died
    FENCED = "fenced"  # it stood still for too long
    EXCLUDED = "excluded"  # the others went on without it
    REFUSED = "refused"  # it was there to join, and runs other code than the job
    UNNEEDED = "unneeded"  # it was there to join, and there was nothing to join any more


UNFIT = "it failed in"  # in what one says that was excluded by its own fault
STACK_SIGNAL = signal.SIGUSR2  # SIGUSR1 is what schedulers send before they take a machine away
_STDERR_PATIENCE = 2.0  # seconds; whoever dies must not wait longer for a reader of its last words

_installed = False
_owner = os.getpid()  # a forked child (a DataLoader worker) is not the rank: it may not speak for it
_last_word = threading.Lock()  # taken, and never given back, by the thread that ends the process
_callbacks: list[Callable[[], object]] = []
_doubts: list[Callable[[BaseException], object]] = []
_stack_file: IO[str] | None = None  # faulthandler writes to its descriptor: keep it open
_speaks_alone = (
    False  # nobody else writes where this rank does, or somebody names it: it need not name itself
)
_exit_code: object = None  # what the script gave to sys.exit
_inside = False  # a step, or one that was left before it was complete

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_leave = os._exit


def rank_file(kind: str, rank: int | None = None) -> Path | None:
    """`<run dir>/ranks/<rank>.<kind>`, or None if there is no run directory or no rank. By default this one's."""
    job, rank = current_job(), process.rank() if rank is None else rank
    if job is None or not job.run_dir or rank is None:
        return None
    return _in_place(job.run_dir, f"{rank}.{kind}")


@functools.cache  # a line in the log of every step, and the device waits for it
def _in_place(run_dir: str, name: str) -> Path:
    return Path(run_dir, "ranks", name)


def log(text: str) -> None:
    """Append a time-stamped line to this rank's log; without a run directory, do nothing. Never raises."""
    path = rank_file("log")
    if path is not None:
        FILES.append(path, f"{_now()} {text.rstrip()}\n".encode(errors="replace"))


def report(text: str) -> None:
    """In the log and on the terminal, for people."""
    log(text)
    print(f"recover: {text}", flush=True)


def speak_alone() -> None:
    """Whoever reads this rank's output knows whose it is."""
    global _speaks_alone
    _speaks_alone = True


def in_step(inside: bool) -> None:
    """This rank enters a step, or has completed it. Whoever raises in the middle of one does not complete it."""
    global _inside
    _inside = inside


def record(
    how: End | str, detail: str = "", rank: int | None = None, more: Mapping[str, object] | None = None
) -> bool:
    """Write this rank's marker, or that of one that cannot speak for itself. Returns whether the launcher finds it."""
    path = rank_file("end", rank)
    if path is None:
        return True
    marker = {"end": str(End(how)), "detail": detail, "time": _now(), "at": time.time(), **(more or {})}
    data = json.dumps(marker).encode() + b"\n"
    if FILES.replace(path, data):
        return True
    # In memory the launcher finds it, and writes it down when there is room.
    job = current_job()
    if job is None or not job.session:
        return False
    try:
        FILES.disk.replace(words_file(Path(job.session), int(path.stem)), data)
    except OSError:
        return False
    return True


def words_file(session: Path, rank: int) -> Path:
    """Where the marker of a rank is that the disk did not take."""
    return session / f"{rank}.words"


def die(
    how: End | str, text: str, detail: str | None = None, more: Mapping[str, object] | None = None
) -> NoReturn:
    """Say why, in the log, the marker and on stderr, then SIGKILL this process. Safe from any thread.

    The marker holds `detail`, one line for the launcher's verdict (the last one of `text` if not given), and `more`.
    """
    _take_last_word()
    FILES.report = lambda text: None  # it would wait for a reader, or for a lock that another thread holds
    for step in (
        lambda: log(f"{how}: {text}"),
        lambda: record(how, text.strip().rpartition("\n")[2] if detail is None else detail, more=more),
        lambda: _write_stderr(text),
    ):
        try:
            step()
        except Exception:
            pass  # a full disk or a closed stream must not keep a dying rank alive
    _kill_self()


def on_success(callback: Callable[[], object]) -> None:
    """Call `callback` when the script has succeeded, before the done marker; the last one registered first."""
    _callbacks.append(callback)


def close() -> None:
    """Run the callbacks that are still waiting. One that raises ends this rank as any exception does."""
    while _callbacks and is_rank():
        _callbacks.pop()()


def on_raise(callback: Callable[[BaseException], object]) -> None:
    """Call `callback` before this rank dies of an exception: a deeper cause may be known, and end it first."""
    _doubts.append(callback)


def die_of(error: BaseException, trace: TracebackType | None = None, where: str = "") -> NoReturn:
    """Die of an exception: its traceback (from `trace` on, if given) is what the rank says."""
    for doubt in _doubts:
        try:
            doubt(error)
        except Exception:
            pass  # whatever goes wrong on the way, this rank dies
    trace = trace or error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, trace))
    if isinstance(error, SystemExit):
        detail = f"the script ended with exit code {error.code!r}"
        text += detail
    else:
        detail = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
    more = {"kind": type(error).__name__, "place": place_of(trace), "ordinary": _is_ordinary(error)}
    die(End.RAISED, where + text, detail, more)


def place_of(trace: TracebackType | None) -> str:
    """Where the user's own code was: the innermost frame that is neither a library's nor ours; else ours; else any."""
    import sysconfig  # only here: every rank would pay for it when it starts

    paths = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    libraries = tuple(path + os.sep for path in paths)
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_tb(trace)
    ]
    ours = [frame for frame in frames if frame[0].startswith(_PACKAGE)]
    users = [frame for frame in frames if frame not in ours and not frame[0].startswith((*libraries, "<"))]
    for among in (users, ours, frames):
        if among:
            file, line, function = among[-1]
            return f"{file}:{line}, in {function}"
    return ""


def _is_ordinary(error: BaseException) -> bool:
    """Whether the job need not answer for it: a loss inside of a step is made good, and a scheduled one was asked for.

    Other threads are never inside of a step.
    """
    in_step = _inside and threading.current_thread() is threading.main_thread()
    return in_step or isinstance(error, KeyboardInterrupt) or getattr(error, "is_scheduled", False)


def succeed() -> NoReturn:
    """The script has succeeded: run the callbacks, flush, write the marker, leave without MPI_Finalize."""
    try:
        close()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        die_of(error)
    _take_last_word()
    if not record(End.DONE):
        FILES.settle()  # without its marker a rank that is through would count as killed
    FILES.flush()  # its log
    _leave(0)


def install_hooks(standalone: bool = False) -> None:
    """Make every way out of this process end in `die` or `succeed`.

    At interpreter exit (threads joined, atexit functions registered later done) the rank succeeds.
    `standalone` is for a script that `recover run` did not start: its uncaught exceptions and its
    `sys.exit(code)` are noted here. (A bare `raise SystemExit(code)` cannot be seen from inside.) Under
    `recover run` the hooks are there before the script is, and a second call changes nothing.
    """
    global _installed, _owner, _stack_file
    if _installed:
        return
    _installed, _owner = True, os.getpid()
    threading.excepthook = _thread_raised
    os._exit = _exit_now
    atexit.register(_at_exit)
    stack = rank_file("stack")
    FILES.report = report
    if stack is not None and (descriptor := FILES.open_to_append(stack)) is not None:
        os.ftruncate(descriptor, 0)
        _stack_file = open(descriptor, "w")  # noqa: SIM115
        faulthandler.enable(_stack_file, all_threads=True)
        faulthandler.register(STACK_SIGNAL, _stack_file, all_threads=True)
    if standalone:
        sys.excepthook = _raised
        sys.exit = _noting(sys.exit)  # type: ignore[assignment]


def close_at_exit() -> None:
    """For a process that is a world by itself: run the callbacks when it ends, unless an exception ends it.

    Nothing else is taken from the script: it raises, exits and is debugged as any other. Under `recover run` the hooks
    are there before, and this changes nothing.
    """
    global _installed, _owner
    if _installed:
        return
    _installed, _owner = True, os.getpid()
    before, raised = sys.excepthook, []

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        raised.append(kind)
        before(kind, error, trace)

    sys.excepthook = note
    atexit.register(lambda: None if raised else close())


def is_rank() -> bool:
    """False in a child that this rank has forked."""
    return os.getpid() == _owner


def _at_exit() -> None:
    if not is_rank():
        return
    if _exit_code not in (None, 0):
        more = {"kind": "SystemExit", "place": "", "ordinary": _inside}
        die(End.RAISED, f"the script called sys.exit({_exit_code!r})", more=more)
    succeed()


def _raised(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not is_rank():
        sys.__excepthook__(kind, error, trace)
        return
    die_of(error, trace)


def _thread_raised(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit or not is_rank():  # sys.exit in a thread ends that thread only
        threading.__excepthook__(args)
        return
    thread = args.thread.name if args.thread else "?"
    die_of(args.exc_value or args.exc_type(), args.exc_traceback, f"In thread {thread}:\n")


def _exit_now(status: int) -> NoReturn:
    """In place of `os._exit`: mpirun answers a process that leaves with a code by ending all others."""
    if status and is_rank():
        text = "".join(traceback.format_stack(sys._getframe(1)))
        more = {"kind": "os._exit", "place": "", "ordinary": _inside}
        die(End.RAISED, f"{text}the script called os._exit({status})", more=more)
    _leave(status)


def _noting(leave: Callable[[Any], NoReturn]) -> Callable[[Any], NoReturn]:
    def exit(code: Any = None, /) -> NoReturn:
        global _exit_code
        _exit_code = code
        leave(code)

    return exit


def _take_last_word() -> None:
    """Return in one thread only: two ends at once would leave a mixed story."""
    if _last_word.acquire(timeout=2 * _STDERR_PATIENCE):
        return
    _kill_self()  # the other one is stuck in its last words


def _kill_self() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    _leave(137)  # never reached


def _write_stderr(text: str) -> None:
    """Past sys.stderr, whose lock another thread may hold, and without waiting for a stuck reader."""
    rank = process.rank()
    prefix = "" if _speaks_alone else f"[rank {'?' if rank is None else rank}] "
    data = "".join(prefix + line + "\n" for line in text.rstrip().splitlines()).encode(errors="replace")
    deadline = time.monotonic() + _STDERR_PATIENCE
    while data and select.select([], [2], [], max(0.0, deadline - time.monotonic()))[1]:
        data = data[os.write(2, data[: select.PIPE_BUF]) :]  # so much fits without blocking


def _now() -> str:
    return datetime.now().isoformat(timespec="milliseconds")
