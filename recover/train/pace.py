"""Microbatches with a minimum duration. Imports nothing, because a restarted process pays for every import."""

from __future__ import annotations

import time


class Pace:
    """Makes microbatches take at least `seconds`, by sleeping before each one for the time that the previous one was
    short.

    Replicas that share a few cores get faster when one of them dies. If most of the time is spent sleeping, each
    behaves as if it had its own accelerator, and comparisons measure the cost of failures.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._started, self._took = seconds, 0.0, 0.0

    def wait(self, microbatches: int = 1) -> None:
        if self._seconds:
            time.sleep(max(0.0, self._seconds - self._took) * microbatches)
            self._started = time.perf_counter()

    def note(self, microbatches: int = 1) -> None:
        self._took = (time.perf_counter() - self._started) / microbatches
