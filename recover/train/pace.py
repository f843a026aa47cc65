"""Microbatches that take a set time. Imports nothing: a process that is started anew pays for every import."""

from __future__ import annotations

import time


class Pace:
    """Makes microbatches take at least so long, by waiting before each one for what the one before it did not take.

    Replicas that share a few cores get faster when one of them dies. With most of the time spent waiting, each behaves
    as if it had an accelerator of its own, and what is compared is what failures cost.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._started, self._took = seconds, 0.0, 0.0

    def wait(self, microbatches: int = 1) -> None:
        if self._seconds:
            time.sleep(max(0.0, self._seconds - self._took) * microbatches)
            self._started = time.perf_counter()

    def note(self, microbatches: int = 1) -> None:
        self._took = (time.perf_counter() - self._started) / microbatches
