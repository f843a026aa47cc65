"""The communication thread: reductions run here while Python computes."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Rest:
    """What is left of an operation that a device goes on with: `wait` until it is through. May raise.

    `passed`: the device's own event of that, if there is one: what is asked of the device behind it finds the result.
    """

    def __init__(self, wait: Callable[[], object], passed: Any = None) -> None:
        self.wait, self.passed = wait, passed


class Work:
    """One operation handed to the communication thread. Errors are kept here and never raised elsewhere."""

    def __init__(self, task: Callable[[], object], is_ready: Callable[[], bool] = lambda: True) -> None:
        self._task: Callable[[], object] | None = task
        self.is_ready = is_ready  # whether its data are there: on a device they come in the device's own time
        self._finished = threading.Event()
        self._handed_on = threading.Event()
        self._passed: Any = None
        self.started = threading.Event()
        self.error: BaseException | None = None
        self.refused = False  # before it began: no library has seen its buffers

    @classmethod
    def failed(cls, error: BaseException) -> Work:
        """A work that was refused before it began."""
        work = cls(lambda: None)
        work.error, work.refused = error, True
        work.started.set()
        work._end()
        return work

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    @property
    def ok(self) -> bool:
        return self.done and self.error is None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; whether it ended well. Local success means nothing before the vote."""
        self._finished.wait(timeout)
        return self.ok

    def behind(self) -> Any:
        """Wait until it has ended, or a device goes on with it: then the device's event of its end, else None."""
        self._handed_on.wait()
        return self._passed

    def run(self) -> Rest | None:
        """Run it, or, if a device goes on with it, begin it: then `finish` must be called with what is left."""
        self.started.set()
        assert self._task is not None
        rest = self._try(self._task)
        if isinstance(rest, Rest) and self.error is None:
            if rest.passed is not None:
                self._passed = rest.passed
                self._handed_on.set()
            return rest
        self._end()
        return None

    def finish(self, rest: Rest) -> None:
        self._try(rest.wait)
        self._end()

    def _try(self, part: Callable[[], object]) -> object:
        try:
            return part()
        except Exception as error:
            # What it says is told; its frames hold this work, and so buffers, threads and sockets, until Python's own
            # search for cycles comes to them.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            self.error = error
            return None

    def _end(self) -> None:
        if self.error is None:
            self._task = None  # frees the buffers; those of a failed operation may still be written to
        self._finished.set()
        self._handed_on.set()


class Worker:
    """A thread that runs what it is given, in order. A second one waits for what devices go on with, in that order, so
    that the next operation is handed to the device while it is busy with the one before."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[tuple[Work, Rest]] | None = None
        # The library may still write to the buffers of an operation that failed.
        self._failed: list[Work] = []
        self._open: deque[Work] = deque()  # posted, and perhaps not ended
        self._ended = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._loop, name="recover-communication", daemon=True).start()

    def post(self, task: Callable[[], object], is_ready: Callable[[], bool] = lambda: True) -> Work:
        work = Work(task, is_ready)
        with self._lock:
            self._forget_ended()
            self._open.append(work)
        self._queue.put(work)
        return work

    def drain(self) -> None:
        """Wait until everything that was posted has ended."""
        with self._lock:
            posted = list(self._open)
        for work in posted:
            work.wait()

    def take_failed(self) -> list[Work]:
        """The works that have failed so far, to be kept until nothing can write to their buffers any more."""
        failed, self._failed = self._failed, []
        return failed

    @property
    def busy(self) -> bool:
        """Whether something that was posted has not ended."""
        with self._lock:
            self._forget_ended()
            return bool(self._open)

    @property
    def ended(self) -> int:
        """How many of those that were posted have ended, one after the other."""
        with self._lock:
            self._forget_ended()
            return self._ended

    @property
    def is_at_wire(self) -> bool:
        """Whether an operation is under way that has its data, so that only others can hold it up."""
        with self._lock:
            self._forget_ended()
            first = self._open[0] if self._open else None
        return first is not None and first.is_ready()

    def _forget_ended(self) -> None:
        while self._open and self._open[0].done:
            self._open.popleft()
            self._ended += 1

    def _loop(self) -> None:
        while True:
            work = self._queue.get()
            rest = work.run()
            if rest is not None:
                self._hand_on(work, rest)
            elif work.error is not None:
                self._failed.append(work)
            del work, rest  # while it waits for the next one, it must not keep the buffers of this one

    def _hand_on(self, work: Work, rest: Rest) -> None:
        if self._begun is None:
            self._begun = queue.SimpleQueue()
            threading.Thread(
                target=self._complete, args=[self._begun], name="recover-completion", daemon=True
            ).start()
        self._begun.put((work, rest))

    def _complete(self, begun: queue.SimpleQueue[tuple[Work, Rest]]) -> None:
        while True:
            work, rest = begun.get()
            work.finish(rest)
            if work.error is not None:
                self._failed.append(work)
            del work, rest
