"""Compares measured times to detection with those that `recover simulate` predicts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean

from recover_lab.simulate.detection import steps_to_detection

DRAWS = 4000
RARE = 4  # of DRAWS: a mean that lies further out agrees by chance in one of a thousand tests


def assert_agrees(measured: Sequence[int], replicas: int, chance: float) -> None:
    """Assert that the mean of `measured` is one that as many simulated devices often have."""
    told = steps_to_detection(replicas, 1, chance)
    rng = random.Random(0)
    means = sorted(fmean(rng.choices(told, k=len(measured))) for _ in range(DRAWS))
    low, high = means[RARE], means[-1 - RARE]
    print(
        f"measured {fmean(measured):.2f} steps, told {fmean(told):.2f}; {low:.2f} to {high:.2f} would agree"
    )
    assert low <= fmean(measured) <= high, measured
