"""How a run of a benchmark has ended."""

from __future__ import annotations


class BenchmarkError(RuntimeError):
    """A run of the benchmark did not finish, or is not a measurement."""


def check(code: int, failure: str) -> None:
    """Raise if a job has failed; leave the process if it was ended by a signal."""
    if code > 128:
        raise SystemExit(code)  # the signal was meant for this process, too
    if code:
        raise BenchmarkError(failure)
