"""Closed forms: checkpoint-restart under Poisson failures, and the endurance of replicated shards."""

from __future__ import annotations

import math


def young(save: float, between: float) -> float:
    """Seconds of work between checkpoints. J. W. Young, A first order approximation to the optimum checkpoint
    interval, Communications of the ACM 17(9), 1974."""
    return math.sqrt(2 * save * between)


def daly(save: float, between: float) -> float:
    """The higher order estimate. J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart
    dumps, Future Generation Computer Systems 22(3), 2006."""
    if save >= 2 * between:
        return between
    ratio = math.sqrt(save / (2 * between))
    return math.sqrt(2 * save * between) * (1 + ratio / 3 + ratio**2 / 9) - save


def best_interval(save: float, between: float) -> float:
    """The exact optimum: where exp(-(t + save) / M) = 1 - t / M. It does not depend on the time of a restart."""
    low, high = 0.0, between
    for _ in range(200):
        middle = (low + high) / 2
        if math.exp(-(middle + save) / between) > 1 - middle / between:
            high = middle
        else:
            low = middle
    return (low + high) / 2


def restart_goodput(every: float, save: float, restart: float, between: float) -> float:
    """The exact expectation: work over time, with failures in saves and in restarts, too (Daly, equation 20).

    A segment of work and its save take M exp(R / M) (exp((t + save) / M) - 1) on the mean.
    """
    taken = between * math.exp(restart / between) * math.expm1((every + save) / between)
    return every / taken


def endured(groups: int, copies: int) -> float:
    """Expected losses of groups until all copies of a shard are lost; copies are on neighbours in a ring."""
    return math.gamma(1 / copies) / copies * groups ** (1 - 1 / copies)
