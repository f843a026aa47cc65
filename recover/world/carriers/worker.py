"""The communication thread: reductions run on it while the main thread computes."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Completion:
    """The end of an operation that a device has yet to reach.

    `wait` blocks until then, and may raise.

    `passed`: the device's event of that end, if there is one: work that is ordered behind it finds
    the result.
    """

    def __init__(self, wait: Callable[[], object], passed: Any = None) -> None:
        self.wait, self.passed = wait, passed


class Work:
    """One operation on the communication thread. Its error is kept in `error`, and not raised."""

    def __init__(self, task: Callable[[], object], is_ready: Callable[[], bool] = lambda: True) -> None:
        self._task: Callable[[], object] | None = task
        self.is_ready = is_ready  # whether its data are complete: on a device they may be under way
        self._finished = threading.Event()
        self._handed_on = threading.Event()
        self._passed: Any = None
        self.started = threading.Event()
        self.error: BaseException | None = None
        self.refused = False  # it failed before it began: no library has seen its buffers

    @classmethod
    def failed(cls, error: BaseException) -> Work:
        """An operation that failed before it began."""
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
        """Wait for the end. Returns whether the operation succeeded on this rank.

        Only the vote says whether it succeeded on all ranks.
        """
        self._finished.wait(timeout)
        return self.ok

    def behind(self) -> Any:
        """Wait until the operation has ended, or is enqueued on a device. Returns the device's
        event of its end in the second case, else None."""
        self._handed_on.wait()
        return self._passed

    def run(self) -> Completion | None:
        """Run the operation, or enqueue it on a device. In the second case `finish` must be called
        with the returned completion."""
        self.started.set()
        assert self._task is not None
        completion = self._try(self._task)
        if isinstance(completion, Completion) and self.error is None:
            if completion.passed is not None:
                self._passed = completion.passed
                self._handed_on.set()
            return completion
        self._end()
        return None

    def finish(self, completion: Completion) -> None:
        self._try(completion.wait)
        self._end()

    def _try(self, part: Callable[[], object]) -> object:
        try:
            return part()
        except Exception as error:
            # The frames of the error refer to this work, and so keep buffers, threads and sockets
            # until the garbage collector finds the cycle.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            self.error = error
            return None

    def _end(self) -> None:
        if self.error is None:
            self._task = None  # frees the buffers; those of a failed operation may still be written to
        self._finished.set()
        self._handed_on.set()


class Worker:
    """A thread that runs operations in order.

    A second thread waits for completions of devices, in the same order, so that the next operation
    is enqueued while the device is busy with the one before.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[tuple[Work, Completion]] | None = None
        # The library may still write to the buffers of an operation that failed.
        self._failed: list[Work] = []
        self._open: deque[Work] = deque()  # posted, and may not have ended
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
        """Wait until all posted operations have ended."""
        with self._lock:
            posted = list(self._open)
        for work in posted:
            work.wait()

    def take_failed(self) -> list[Work]:
        """The operations that failed.

        The caller keeps them until no library can write to their buffers any more.
        """
        failed, self._failed = self._failed, []
        return failed

    @property
    def busy(self) -> bool:
        """Whether a posted operation has not ended."""
        with self._lock:
            self._forget_ended()
            return bool(self._open)

    @property
    def ended(self) -> int:
        """How many of the posted operations have ended, in order."""
        with self._lock:
            self._forget_ended()
            return self._ended

    @property
    def is_at_wire(self) -> bool:
        """Whether the first open operation has its data, so that only peers can hold it up."""
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
            completion = work.run()
            if completion is not None:
                self._hand_on(work, completion)
            elif work.error is not None:
                self._failed.append(work)
            del work, completion  # must not keep the buffers while the thread waits for the next operation

    def _hand_on(self, work: Work, completion: Completion) -> None:
        if self._begun is None:
            self._begun = queue.SimpleQueue()
            threading.Thread(
                target=self._complete, args=[self._begun], name="recover-completion", daemon=True
            ).start()
        self._begun.put((work, completion))

    def _complete(self, begun: queue.SimpleQueue[tuple[Work, Completion]]) -> None:
        while True:
            work, completion = begun.get()
            work.finish(completion)
            if work.error is not None:
                self._failed.append(work)
            del work, completion
