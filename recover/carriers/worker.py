"""The communication thread: reductions run here while Python computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Work:
    """One operation handed to the communication thread. Errors are kept here and never raised elsewhere."""

    def __init__(self, task: Callable[[], object]) -> None:
        self._task: Callable[[], object] | None = task
        self._finished = threading.Event()
        self.started = threading.Event()
        self.error: BaseException | None = None
        self.refused = False  # before it began: no library has seen its buffers

    @classmethod
    def failed(cls, error: BaseException) -> Work:
        """A work that was refused before it began."""
        work = cls(lambda: None)
        work.error, work.refused = error, True
        work.started.set()
        work._finished.set()
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

    def run(self) -> None:
        self.started.set()
        try:
            assert self._task is not None
            self._task()
        except Exception as error:
            self.error = error
        finally:
            if self.error is None:
                self._task = None  # frees the buffers; those of a failed operation may still be written to
            self._finished.set()


class Worker:
    """A thread that runs what it is given, in order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._failed: list[
            Work
        ] = []  # the library may still write to the buffers of an operation that failed
        self._last = Work.failed(RuntimeError("nothing was posted yet"))
        threading.Thread(target=self._loop, name="recover-communication", daemon=True).start()

    def post(self, task: Callable[[], object]) -> Work:
        self._last = work = Work(task)
        self._queue.put(work)
        return work

    def drain(self) -> None:
        """Wait until everything that was posted has ended."""
        self._last.wait()

    def take_failed(self) -> list[Work]:
        """The works that have failed so far, to be kept until nothing can write to their buffers any more."""
        failed, self._failed = self._failed, []
        return failed

    @property
    def busy(self) -> bool:
        """Whether something that was posted has not ended."""
        return not self._last.done

    def _loop(self) -> None:
        while True:
            work = self._queue.get()
            work.run()
            if work.error is not None:
                self._failed.append(work)
            del work  # while it waits for the next one, it must not keep the buffers of this one
