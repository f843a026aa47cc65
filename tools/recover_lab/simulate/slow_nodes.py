"""How slow nodes lengthen the steps of a job: older generations all the time, throttled nodes for a while.

With equal shares every replica waits for the slowest one. With `job.policy=paced` the shares follow the speed, dealt by
the production policy, some steps after it has changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from recover.policy.paced import GRAIN, KNOWN, deal_by_speed
from recover_lab.simulate.failures import slow_spells
from recover_lab.simulate.scenario import Scenario


@dataclass(frozen=True)
class Slowness:
    """Factors by which a step of the job takes longer than one on equal nodes of the newest generation."""

    calm: float  # without a throttled node
    struck: float  # with one
    relieved: float  # with one, once the shares have followed

    def spells(self, scenario: Scenario, seed: int, horizon: float) -> list[tuple[float, float]]:
        """Times at which the factor changes, each with the factor afterwards."""
        times = slow_spells(scenario, seed, horizon)
        if self.relieved == self.struck:
            return [(at, self.calm if number % 2 else self.struck) for number, at in enumerate(times)]
        changes: list[tuple[float, float]] = []
        lasts = (
            KNOWN * scenario.full_step
        )  # until the shares follow: so many steps, each longer by the factor
        for begins, ends, next_begins in zip(times[::2], times[1::2], [*times[2::2], math.inf], strict=False):
            changes.append((begins, self.struck))
            back = ends
            if (follow := begins + lasts * self.struck) < ends:
                changes.append((follow, self.relieved))
                back = ends + lasts * self.relieved  # the node is fast again, and has little to do
            if back < next_begins:
                changes.append((back, self.calm))
        return changes


def slowness_of(scenario: Scenario, paced: bool) -> Slowness:
    nodes, replicas, slots = scenario.stragglers, scenario.replicas, scenario.global_batch
    old = math.ceil(nodes.old_share * replicas)
    new = replicas - old
    factors = [nodes.old_factor] * old + [1.0] * new
    throttled = [*factors[:-1], max(nodes.factor, factors[-1])]
    if not paced:
        return Slowness(max(factors), max(throttled), max(throttled))
    accum = scenario.job.accum

    def longest(sizes: list[int], speeds: list[float]) -> float:
        return max(size * speed for size, speed in zip(sizes, speeds, strict=True)) / accum

    dealt, better = (
        deal_by_speed(slots, [round(GRAIN * factor) for factor in speeds], least=1)
        for speeds in (factors, throttled)
    )
    struck = longest(dealt, throttled)
    return Slowness(longest(dealt, factors), struck, min(struck, longest(better, throttled)))
