"""How a run of a comparison or of a benchmark has ended."""

from __future__ import annotations


class BenchmarkError(RuntimeError):
    """A run of the benchmark did not finish; there is no figure to show."""


def check(code: int, failure: str) -> None:
    """Of a job that has ended: did it do so by itself, and well?"""
    if code > 128:
        raise SystemExit(code)  # by a signal that was meant for us
    if code:
        raise BenchmarkError(failure)
