"""Requests to stop a run early: a file in its directory, or a signal to a rank."""

from __future__ import annotations

import signal
from pathlib import Path

import recover

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequests:
    """A rank that receives a request asks all replicas to stop together, after the current step."""

    def __init__(self, step: recover.Step, run_dir: Path) -> None:
        self._step, self._file = step, run_dir / "stop"
        # Where SIGTERM asks a host to leave, a rank leaves the answer to its agent.
        self._signals = [each for each in SIGNALS if each != signal.SIGTERM or not step.world.job.leaves]

    def listen(self) -> None:
        """The first signal is a request; the second one finds no handler and kills."""
        for number in self._signals:
            signal.signal(number, self._hear)

    def look(self) -> None:
        """Check whether the launcher has requested a stop, by the file."""
        if self._file.exists():
            self._step.request_stop()

    def _hear(self, *_: object) -> None:
        self._step.request_stop()
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)
