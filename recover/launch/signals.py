"""Signals to the process that looks after a job: a launcher, or the agent of a host.

The first SIGINT, SIGTERM or SIGUSR1 asks the ranks to stop after their step, if they heed such
requests; the second one ends the job at once, and so does the first one if they do not, and SIGHUP.
SIGTERM to the agent of one of several hosts asks that host alone to leave, and a second one to leave at
once (`recover.launch.hosts.departure`).
Ranks have sessions of their own, so Ctrl-C in a terminal does not reach them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from recover.job.output import OUTLET, say
from recover.job.record_files import FILES

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_LAST_WORDS = (
    2.0  # seconds without a reader of our output after which a process that a signal ends does not wait
)


def _nothing() -> str:
    return ""


class JobSignals:
    """Handles signals while entered. Enter it on the main thread; the job may run on another one."""

    def __init__(self) -> None:
        self.caught: list[int] = []  # signals that end the job at once
        self.asked = 0  # the signal that asked the ranks to stop; 0: none
        self.left = False  # this host has left, and the job continues on others
        self.ignored: tuple[int, ...] = ()
        self.ask: Callable[[], str] = _nothing
        """Asks the ranks to stop after their step. Returns what they do now, or "" if they heed no request."""
        self.leave: Callable[[], str] = _nothing
        """Asks this host to leave the job. Returns what it does now, or "" if it does not leave."""
        self._end: Callable[[], object] = _nothing
        self._is_over = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (*REQUESTS, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                    self._previous[number] = signal.signal(number, self.handle)
        return self

    def __exit__(self, *_: object) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[list[int]]:
        """While inside, a signal that ends the job calls `end`; the list then holds its number."""
        self._end = end
        try:
            if self.caught:  # before there was a job
                end()
            yield self.caught
        except OSError:
            if not self.caught:
                raise  # otherwise the handler has ended the job that is being worked on
        finally:
            self._end = self.ask = self.leave = _nothing
            self._is_over = True

    def handle(self, number: int, _: object = None) -> None:
        if number in self.ignored:
            return
        if self._is_over:  # the job has ended, so the signal changes nothing of its outcome
            OUTLET.patience, FILES.patience = _LAST_WORDS, 0.0
            return
        if number == signal.SIGTERM and not self.asked and not self.caught and (doing := self.leave()):
            self._say(number, doing)
            return
        self.stop(number)

    def stop(self, number: int) -> None:
        """Stop the whole job after its step, if the ranks heed requests, or else end it."""
        if number in REQUESTS and not self.asked and not self.caught:
            self.asked = number  # before `ask`, which may block: the next signal must end the job
            if doing := self.ask():
                self._say(number, f"{doing}; once more ends the job at once")
                return
            self.asked = 0
        self.caught.append(number)
        OUTLET.patience, FILES.patience = _LAST_WORDS, 0.0
        self._end()  # in the handler: the main loop may be blocked by a reader of our output

    @staticmethod
    def _say(number: int, doing: str) -> None:
        text = f"{signal.Signals(number).name}: {doing}"
        # On a thread, not in the handler: the signal may have come while this thread was writing its output.
        threading.Thread(target=say, args=[text], name="recover-say", daemon=True).start()

    def outcome(self) -> dict[str, Any]:
        """How the signals have ended the job, for its records."""
        if self.caught:
            return {"signal": signal.Signals(self.caught[0]).name}
        return {"signal": signal.Signals(self.asked).name, "asked": True} if self.asked else {}

    def code(self, code: int) -> int:
        """The exit code of a job that would end with `code` without signals."""
        number = self.caught[0] if self.caught else 0 if code else self.asked
        return 128 + number if number else code
