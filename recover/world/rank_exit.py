"""How a rank ends: it leaves a marker that says how, and ends in a way that the other ranks notice.

The other ranks notice SIGKILL within milliseconds and never notice `exit(1)`. So a rank either
succeeds (closing callbacks, marker, exit 0 without MPI_Finalize, which can hang after a failure) or
writes down why it failed and kills itself. The launcher's verdict is read from the markers:

    <run dir>/ranks/<rank>.log     time-stamped lines, tracebacks included
    <run dir>/ranks/<rank>.end     JSON: end, detail, time, and of an exception kind, place and whether it is ordinary;
                                   absent if the rank was killed from outside
    <run dir>/ranks/<rank>.stack   stacks of all threads, on SIGUSR2 and on a crash in native code

A process is one rank, so there is one instance, `RANK_EXIT`. Its methods are also functions of this
module.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import io
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

from recover.job import process
from recover.job.record_files import FILES
from recover.job.spec import current_job


class End(StrEnum):
    """How a rank ended, as its marker says."""

    DONE = "done"  # the script ran to its end
    RAISED = "raised"  # an exception in any thread, or an exit code other than 0
    ORPHAN = "orphan"  # another rank of its replica died
    FENCED = "fenced"  # it made no progress for too long
    EXCLUDED = "excluded"  # the other ranks continued without it
    REFUSED = "refused"  # it was to join, and runs other code than the job
    UNNEEDED = "unneeded"  # it was to join, and the job had ended
    LEFT = "left"  # its host, or another host of its replica, was asked to leave the job


# Reason with which an agent declares a rank dead that has left on notice.
ON_NOTICE = "left on notice"
# Part of the detail of a rank that was excluded because its own carrier failed.
UNFIT = "it failed in"
# SIGUSR1 is what schedulers send before they take a machine away.
STACK_SIGNAL = signal.SIGUSR2
# Seconds that a dying rank waits for a reader of its standard error.
_STDERR_PATIENCE = 2.0

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# The real `os._exit`: `install` replaces it.
_exit_process = os._exit


class RankExit:
    """The log, the marker and the end of this process, which is one rank."""

    def __init__(self) -> None:
        self._installed = False
        # A forked child (a DataLoader worker) is not the rank and must not write or end in its
        # name.
        self._owner = os.getpid()
        # Acquired, and never released, by the thread that ends the process.
        self._ending = threading.Lock()
        self._on_success: list[Callable[[], object]] = []
        self._on_raise: list[Callable[[BaseException], object]] = []
        # faulthandler writes to its descriptor, so it stays open.
        self._stack_file: IO[str] | None = None
        self._names_itself = True
        self._exit_code: object = None
        self._in_step = False

    def log(self, text: str) -> None:
        """Append a time-stamped line to this rank's log; without a run directory, do nothing.

        Never raises.
        """
        path = rank_file("log")
        if path is not None:
            FILES.append(path, f"{_now()} {text.rstrip()}\n".encode(errors="replace"))

    def report(self, text: str, is_shown: bool = True) -> None:
        """Write a line to the log and, if `is_shown`, to standard output."""
        self.log(text)
        if is_shown:
            print(f"recover: {text}", flush=True)

    def record(
        self,
        how: End | str,
        detail: str = "",
        rank: int | None = None,
        more: Mapping[str, object] | None = None,
    ) -> bool:
        """Write the marker of this rank, or of `rank`, which was killed.

        Returns whether the launcher will find it.
        """
        path = rank_file("end", rank)
        if path is None:
            return True
        marker = {"end": str(End(how)), "detail": detail, "time": _now(), "at": time.time(), **(more or {})}
        data = json.dumps(marker).encode() + b"\n"
        if FILES.replace(path, data):
            return True
        # The session is in memory: the launcher finds the marker there, and writes it to disk when
        # there is room.
        job = current_job()
        if job is None or not job.session:
            return False
        try:
            FILES.disk.replace(session_marker(Path(job.session), int(path.stem)), data)
        except OSError:
            return False
        return True

    def omit_rank_prefix(self) -> None:
        """Write to standard error without the prefix `[rank N]`: the reader of this rank's output
        knows its rank."""
        self._names_itself = False

    def in_step(self, inside: bool) -> None:
        """Note that this rank enters a step, or has completed it.

        An exception does not complete a step.
        """
        self._in_step = inside

    def on_success(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the script has succeeded, before the marker is written.

        Callbacks run in reverse order: the last one first.
        """
        self._on_success.append(callback)

    def on_raise(self, callback: Callable[[BaseException], object]) -> None:
        """Call `callback` before this rank dies of an exception.

        It may end the rank with a deeper cause.
        """
        self._on_raise.append(callback)

    def close(self) -> None:
        """Run the remaining success callbacks.

        An exception in one of them ends this rank as any exception does.
        """
        while self._on_success and self.is_rank():
            self._on_success.pop()()

    def die(
        self, how: End | str, text: str, detail: str | None = None, more: Mapping[str, object] | None = None
    ) -> NoReturn:
        """Write the reason to the log, the marker and standard error, then SIGKILL this process.

        Any thread may call this.

        The marker holds `detail`, one line for the launcher's verdict (the last line of `text` if
        not given), and `more`.
        """
        self._enter_end()
        # Reporting would wait for a reader of standard output, or for a lock that another thread
        # holds.
        FILES.report = lambda text: None
        for write in (
            lambda: self.log(f"{how}: {text}"),
            lambda: self.record(
                how, text.strip().rpartition("\n")[2] if detail is None else detail, more=more
            ),
            lambda: self._write_stderr(text),
        ):
            try:
                write()
            except Exception:
                pass  # a full disk or a closed stream must not keep a dying rank alive
        _kill_self()

    def die_of_exception(
        self, error: BaseException, trace: TracebackType | None = None, where: str = ""
    ) -> NoReturn:
        """Die of an exception, with its traceback (from `trace` on, if given) as the reason."""
        for callback in self._on_raise:
            try:
                callback(error)
            except Exception:
                pass  # this rank dies in any case
        trace = trace or error.__traceback__
        text = "".join(traceback.format_exception(type(error), error, trace))
        if isinstance(error, SystemExit):
            detail = f"the script ended with exit code {error.code!r}"
            text += detail
        else:
            detail = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        more = {"kind": type(error).__name__, "place": place_of(trace), "ordinary": self._is_ordinary(error)}
        self.die(End.RAISED, where + text, detail, more)

    def succeed(self) -> NoReturn:
        """End a rank whose script has succeeded: callbacks, flush, marker, exit 0 without
        MPI_Finalize."""
        self._flush(self.close)
        self._enter_end()
        if not self.record(End.DONE):
            FILES.settle()  # a rank without a marker would count as killed
        FILES.flush()
        _exit_process(0)

    def leave(self, detail: str) -> NoReturn:
        """End a rank that leaves a running job: flush, marker, exit 0. `detail`: when it left.

        Success callbacks do not run: they agree with the others on the end of the job.
        """
        self._flush()
        self._enter_end()
        self.log(f"{End.LEFT}: {ON_NOTICE} {detail}")
        self.record(End.LEFT, f"{ON_NOTICE} {detail}")
        FILES.flush()
        _exit_process(0)

    def _flush(self, *before: Callable[[], object]) -> None:
        """Call these, and flush all output. An exception in it is one of the script."""
        try:
            for call in before:
                call()
            sys.stdout.flush()
            sys.stderr.flush()
            flush_open_files()
        except BaseException as error:
            self.die_of_exception(error)

    def install(self, standalone: bool = False) -> None:
        """Make every way out of this process end in `die` or `succeed`.

        A second call changes nothing.

        At interpreter exit (threads joined, later atexit functions done) the rank succeeds.
        `standalone` is for a script that `recover run` did not start: its uncaught exceptions and
        its `sys.exit(code)` are noted here. (A bare `raise SystemExit(code)` cannot be seen from
        inside.) `recover run` installs before the script starts.
        """
        if self._installed:
            return
        self._installed, self._owner = True, os.getpid()
        threading.excepthook = self._thread_raised
        os._exit = self._exit_with_status
        atexit.register(self._at_exit)
        FILES.report = self.report
        stack = rank_file("stack")
        if stack is not None and (descriptor := FILES.open_to_append(stack)) is not None:
            os.ftruncate(descriptor, 0)
            self._stack_file = open(descriptor, "w")  # noqa: SIM115
            faulthandler.enable(self._stack_file, all_threads=True)
            faulthandler.register(STACK_SIGNAL, self._stack_file, all_threads=True)
        if standalone:
            sys.excepthook = self._raised
            sys.exit = self._noting_code(sys.exit)  # type: ignore[assignment]

    def close_at_exit(self) -> None:
        """For a process that is a world by itself: run the success callbacks when it ends, unless
        an exception ends it.

        Everything else is left to the script: it raises, exits and is debugged as any other. After
        `install` this changes nothing.
        """
        if self._installed:
            return
        self._installed, self._owner = True, os.getpid()
        before, raised = sys.excepthook, []

        def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            raised.append(kind)
            before(kind, error, trace)

        sys.excepthook = note
        atexit.register(lambda: None if raised else self.close())

    def is_rank(self) -> bool:
        """Return False in a child that this rank has forked."""
        return os.getpid() == self._owner

    def _is_ordinary(self, error: BaseException) -> bool:
        """Whether the job can still succeed: a loss inside a step is repaired, and a scheduled
        fault was asked for.

        Only the main thread is ever inside a step.
        """
        in_step = self._in_step and threading.current_thread() is threading.main_thread()
        return in_step or isinstance(error, KeyboardInterrupt) or getattr(error, "is_scheduled", False)

    def _at_exit(self) -> None:
        if not self.is_rank():
            return
        if self._exit_code not in (None, 0):
            more = {"kind": "SystemExit", "place": "", "ordinary": self._in_step}
            self.die(End.RAISED, f"the script called sys.exit({self._exit_code!r})", more=more)
        self.succeed()

    def _raised(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not self.is_rank():
            sys.__excepthook__(kind, error, trace)
            return
        self.die_of_exception(error, trace)

    def _thread_raised(self, args: threading.ExceptHookArgs) -> None:
        # `sys.exit` in a thread ends that thread only.
        if args.exc_type is SystemExit or not self.is_rank():
            threading.__excepthook__(args)
            return
        thread = args.thread.name if args.thread else "?"
        self.die_of_exception(args.exc_value or args.exc_type(), args.exc_traceback, f"In thread {thread}:\n")

    def _exit_with_status(self, status: int) -> NoReturn:
        """Replacement of `os._exit`: when a process exits with a code, mpirun ends all other ranks."""
        if status and self.is_rank():
            text = "".join(traceback.format_stack(sys._getframe(1)))
            more = {"kind": "os._exit", "place": "", "ordinary": self._in_step}
            self.die(End.RAISED, f"{text}the script called os._exit({status})", more=more)
        _exit_process(status)

    def _noting_code(self, leave: Callable[[Any], NoReturn]) -> Callable[[Any], NoReturn]:
        def exit(code: Any = None, /) -> NoReturn:
            self._exit_code = code
            leave(code)

        return exit

    def _enter_end(self) -> None:
        """Return in one thread only: two threads that end the process at once would mix their
        reasons."""
        if self._ending.acquire(timeout=2 * _STDERR_PATIENCE):
            return
        _kill_self()  # the other thread is stuck

    def _write_stderr(self, text: str) -> None:
        """Bypass sys.stderr, whose lock another thread may hold, and do not wait for a stuck
        reader."""
        rank = process.rank()
        prefix = f"[rank {'?' if rank is None else rank}] " if self._names_itself else ""
        data = "".join(prefix + line + "\n" for line in text.rstrip().splitlines()).encode(errors="replace")
        deadline = time.monotonic() + _STDERR_PATIENCE
        while data and select.select([], [2], [], max(0.0, deadline - time.monotonic()))[1]:
            data = data[os.write(2, data[: select.PIPE_BUF]) :]  # this much fits without blocking


def rank_file(kind: str, rank: int | None = None) -> Path | None:
    """`<run dir>/ranks/<rank>.<kind>`, by default of this rank; None if there is no run directory
    or no rank."""
    job, rank = current_job(), process.rank() if rank is None else rank
    if job is None or not job.run_dir or rank is None:
        return None
    return _in_place(job.run_dir, f"{rank}.{kind}")


# Cached: every step writes a line to the log, and the device waits meanwhile.
@functools.cache
def _in_place(run_dir: str, name: str) -> Path:
    return Path(run_dir, "ranks", name)


def session_marker(session: Path, rank: int) -> Path:
    """The marker of a rank in the session, for when the run directory could not be written to."""
    return session / f"{rank}.words"


def place_of(trace: TracebackType | None) -> str:
    """The innermost frame of the user's code; if there is none, of this package; otherwise of a
    library."""
    import sysconfig  # here, because every rank would pay for it when it starts

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


def flush_open_files() -> None:
    """Write the buffers of files that the script has left open: the exit of a rank skips the end of the
    interpreter, which does so otherwise."""
    for each in gc.get_objects():
        # By `type`: proxies and lazy objects would run code to answer isinstance.
        if issubclass(type(each), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with suppress(Exception):  # closed, or its reader is gone
                each.flush()


def _kill_self() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    _exit_process(137)  # never reached


def _now() -> str:
    return datetime.now().isoformat(timespec="milliseconds")


RANK_EXIT = RankExit()
log, report, record = RANK_EXIT.log, RANK_EXIT.report, RANK_EXIT.record
omit_rank_prefix, in_step, is_rank = RANK_EXIT.omit_rank_prefix, RANK_EXIT.in_step, RANK_EXIT.is_rank
on_success, on_raise, close = RANK_EXIT.on_success, RANK_EXIT.on_raise, RANK_EXIT.close
die, die_of_exception, succeed = RANK_EXIT.die, RANK_EXIT.die_of_exception, RANK_EXIT.succeed
install_hooks, close_at_exit = RANK_EXIT.install, RANK_EXIT.close_at_exit
