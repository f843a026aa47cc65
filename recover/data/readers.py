"""Reader processes: read microbatches before they are asked for, any number, in any order, each once.

torch's DataLoader does not fit. Its order is fixed when an iterator is made, so work that a death adds would wait
behind work that is no longer needed; it draws a seed from the user's generator; and a worker that dies raises in the
rank at any moment, even in the middle of a vote. Here the rank sends numbers and takes answers, without any thread.

Workers are forked, as those of DataLoader: a script needs no `if __name__ == "__main__"`, and its objects need not be
pickled. They never touch MPI or a GPU. The kernel ends them with their rank, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.util import get_temp_dir
from typing import Any

from recover.data.sending import pack

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
REPLACED = 8  # dead workers that are replaced; afterwards this process reads by itself
AHEAD = 64  # microbatches that are read ahead: each may hold memory and open files


@dataclass
class _Worker:
    process: Any
    line: Connection
    owes: deque[int] = field(default_factory=deque)  # in the order of its answers


class Readers:
    """`workers` processes that call `read(index)`, each a copy of this process when it first reads ahead.

    `read_here`: the same in this process, whose random generators must not change.
    """

    def __init__(self, read: Callable[[int], Any], read_here: Callable[[int], Any], workers: int) -> None:
        self._read, self._read_here, self._count = read, read_here, workers
        self._workers: list[_Worker] = []
        self._coming: deque[int] = deque()  # announced, and not sent to a worker yet
        self._arrived: dict[int, Any] = {}
        self._owner: int | None = None
        self._lost = 0
        self._processes: list[Any] = []  # all living ones
        weakref.finalize(self, _end, self._processes, os.getpid())

    def announce(self, coming: Iterable[int]) -> None:
        """Announce what will be asked for, in this order; other microbatches that were read are dropped."""
        wanted = dict.fromkeys(coming)
        self._take_what_is_there()
        self._arrived = {index: value for index, value in self._arrived.items() if index in wanted}
        owed = {index for worker in self._workers for index in worker.owes}
        self._coming = deque(index for index in wanted if index not in owed and index not in self._arrived)
        self._ask()

    def get(self, index: int) -> Any:
        """The microbatch: read ahead if it was announced in time, otherwise read here."""
        while index not in self._arrived:
            worker = next((each for each in self._workers if index in each.owes), None)
            if worker is None:
                if index in self._coming:
                    self._coming.remove(index)
                return self._read_here(index)
            self._take(wait_for=worker)
        value = self._arrived.pop(index)
        self._take_what_is_there()
        self._ask()
        if isinstance(value, _Raised):
            value.again()
        return value

    def _ask(self) -> None:
        """Send announced microbatches to workers, within the limit."""
        if not self._coming or not self._start():
            return
        held = len(self._arrived) + sum(len(worker.owes) for worker in self._workers)
        while self._coming and held < max(AHEAD, 2 * self._count):
            idlest = min(self._workers, key=lambda worker: len(worker.owes))
            try:
                idlest.line.send(self._coming[0])
            except OSError:
                self._bury(idlest)
                return  # the rest is read when it is asked for
            idlest.owes.append(self._coming.popleft())
            held += 1

    def _start(self) -> bool:
        """Start workers in the process that uses them: a forked process has none of its own yet."""
        if self._owner != os.getpid():
            self._owner, self._workers, self._arrived = os.getpid(), [], {}
            self._processes.clear()
        if self._count and self._lost <= REPLACED:
            import torch.multiprocessing  # sends tensors between processes in shared memory

            get_temp_dir()  # all share the rank's directory: a killed worker would leave its own behind
            context = torch.multiprocessing.get_context("fork")
            while len(self._workers) < self._count:
                here, there = context.Pipe()
                process = context.Process(
                    target=_serve, args=(there, here, self._read, os.getpid()), daemon=True
                )
                with warnings.catch_warnings():
                    # Python warns of forks in processes with threads. Our threads hold no lock that reading needs.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                there.close()
                self._processes.append(process)
                self._workers.append(_Worker(process, here))
        return bool(self._workers)

    def _take_what_is_there(self) -> None:
        """Take all answers that have arrived. They wait in a pipe of limited size, and a full one stops its
        worker."""
        for worker in list(self._workers) if self._owner == os.getpid() else []:
            while worker in self._workers and worker.owes and worker.line.poll():
                self._take(worker)

    def _take(self, wait_for: _Worker) -> None:
        """Take the next answer of this worker, and meanwhile those of the others, so that they can continue."""
        lines = {worker.line: worker for worker in self._workers if worker.owes}
        for line in [wait_for.line] if wait_for.line.poll() else wait(list(lines)):
            worker = lines[line]  # type: ignore[index]
            try:
                value = worker.line.recv()  # by pickle: from our own process, through a pipe
            except (EOFError, OSError):
                self._bury(worker)
            else:
                self._arrived[worker.owes.popleft()] = value

    def _bury(self, worker: _Worker) -> None:
        """Remove a dead worker. Its microbatches are read when they are asked for, and a new worker is
        started later."""
        self._workers.remove(worker)
        self._processes.remove(worker.process)
        self._lost += 1
        worker.line.close()
        worker.process.join(1.0)
        code = worker.process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        print(
            f"recover: a process that read data has ended ({how}; out of memory?); what it owed is read in the rank",
            file=sys.stderr,
            flush=True,
        )


class _Raised:
    """An exception that a worker sends to its rank."""

    def __init__(self, index: int) -> None:
        from torch._utils import ExceptionWrapper  # as DataLoader sends it: kind, message and traceback

        self._wrapped = ExceptionWrapper(where=f"in a process that read microbatch {index} ahead")

    def again(self) -> None:
        self._wrapped.reraise()


def _end(processes: list[Any], owner: int) -> None:
    """End all workers. (Other workers hold copies of a worker's pipe, so closing it would not end it.)"""
    for process in processes if os.getpid() == owner else ():
        process.kill()
        process.join()


def _serve(line: Connection, other_end: Connection, read: Callable[[int], Any], rank: int) -> None:
    """The main loop of a worker: answer requests in order."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != rank:  # the rank died before the kernel knew of our request
        os._exit(1)
    for number in _SIGNALS:  # the handlers of the rank are not for workers
        signal.signal(number, signal.SIG_DFL)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the rank, too, and the kernel ends us with it
    import torch

    torch.set_num_threads(1)  # OpenMP would wait for threads that do not exist after a fork
    other_end.close()
    while True:
        try:
            index = line.recv()  # from our own rank
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer = read(index)
        except Exception:
            answer = _Raised(index)
        try:
            line.send_bytes(pack(answer))
        except (EOFError, OSError):
            os._exit(0)
        except Exception:  # it cannot be pickled
            line.send(_Raised(index))
