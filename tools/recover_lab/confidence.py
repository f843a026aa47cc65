"""Confidence intervals of paired measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its two-sided 95% interval (Student's t); one value has no interval but itself."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean, mean
    half = _student_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def _student_95(freedom: int) -> float:
    """The two-sided 95% quantile of Student's t, by the usual expansion around the normal one."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
