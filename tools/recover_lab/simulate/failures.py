"""The failures of one seed, in order: the same for every system of a comparison.

A failure comes when the nodes that are there have been exposed for long enough together: half of the nodes, half as
many failures an hour. Between failures lies an exposure that is drawn as the scenario says (exponential, Weibull,
always the same).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from recover_lab.simulate.scenario import Scenario
from recover_lab.simulate.scenario_keys import DAY, HOUR

_CHUNK = 2048


class NodeFailure(NamedTuple):
    gap: float  # exposure since the previous failure, in node-seconds
    chance: float  # selects the node, from 0 to 1
    nodes: int  # that fail
    transient: bool  # the nodes are healthy again at once
    silent: bool
    repair: float  # seconds


def draw_failures(scenario: Scenario, seed: int) -> Iterator[NodeFailure]:
    """An endless sequence."""
    rng = np.random.default_rng([seed, 1])
    failures, cluster = scenario.failures, scenario.cluster
    of_racks = failures.per_rack_day / cluster.nodes_per_rack if cluster.nodes_per_rack else 0.0
    of_switches = failures.per_switch_day / cluster.nodes_per_switch if cluster.nodes_per_switch else 0.0
    whole = scenario.rate * DAY
    rack, switch = of_racks / whole, of_switches / whole
    mean = 1 / scenario.rate
    while True:
        # Always drawn in the same order, so that scenarios with other rates see the same draws.
        draws = rng.random((6, _CHUNK))
        even = rng.exponential(1.0, _CHUNK)
        if failures.process == "regular":
            gaps = np.full(_CHUNK, mean)
        elif failures.process == "weibull":
            gaps = mean / math.gamma(1 + 1 / failures.shape) * even ** (1 / failures.shape)
        else:
            gaps = mean * even
        nodes = np.where(draws[1] < failures.burst, failures.burst_nodes, 1)
        nodes = np.where(draws[0] < rack + switch, max(cluster.nodes_per_switch, 1), nodes)
        nodes = np.where(draws[0] < rack, max(cluster.nodes_per_rack, 1), nodes)
        times = -np.log1p(-draws[5]) if failures.repair == "exponential" else np.ones(_CHUNK)
        columns = (
            gaps,
            draws[2],
            nodes,
            draws[3] < failures.transient,
            draws[4] < failures.silent,
            times * failures.repair_hours * HOUR,
        )
        yield from map(NodeFailure._make, zip(*(column.tolist() for column in columns), strict=True))


def slow_spells(scenario: Scenario, seed: int, horizon: float) -> list[float]:
    """Times at which a slow node begins to delay the job, and at which that ends, alternating."""
    if not scenario.stragglers.per_node_day:
        return []
    rng = np.random.default_rng([seed, 2])
    gap = DAY / (scenario.stragglers.per_node_day * scenario.cluster.nodes)
    lasting, at = scenario.stragglers.minutes * 60, 0.0
    spells: list[float] = []
    while (at := at + rng.exponential(gap)) < horizon:
        if spells and at <= spells[-1]:
            spells[-1] = at + lasting
        else:
            spells += [at, at + lasting]
    assert all(a < b for a, b in pairwise(spells))
    return spells


class Fleet:
    """Counts of nodes: in the job, free, or under repair; and the time of the next failure."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.total = scenario.cluster.nodes + scenario.cluster.spares
        self.free = self.total
        self.down = 0
        self._repairs: list[tuple[float, int]] = []
        self._mishaps = draw_failures(scenario, seed)
        self._since = 0.0
        self._left = 0.0
        self._draw()

    @property
    def healthy(self) -> int:
        return self.total - self.down

    def next_failure(self) -> float:
        healthy = self.total - self.down
        return self._since + self._left / healthy if healthy else math.inf

    def next_repair(self) -> float:
        return self._repairs[0][0] if self._repairs else math.inf

    def strike(self, now: float) -> NodeFailure:
        """Take the failure that is due."""
        struck = self._next
        self._draw()
        self._since = now
        return struck

    def lose(self, now: float, nodes: int, failure: NodeFailure) -> None:
        """Move free nodes to repair."""
        nodes = min(nodes, self.free)
        if failure.transient or not nodes:
            return
        self._left -= (now - self._since) * (self.total - self.down)
        self._since = now
        self.free -= nodes
        self.down += nodes
        heappush(self._repairs, (now + failure.repair, nodes))

    def return_repaired(self, now: float) -> int:
        """Free the nodes whose repair is due; returns their number."""
        self._left -= (now - self._since) * (self.total - self.down)
        self._since = now
        _, nodes = heappop(self._repairs)
        self.down -= nodes
        self.free += nodes
        return nodes

    def _draw(self) -> None:
        self._next = next(self._mishaps)
        self._left = self._next.gap


def hits(failure: NodeFailure, inside: int, healthy: int) -> int:
    """Failed nodes that are among the `inside` nodes of the job."""
    if failure.nodes == 1:
        return int(failure.chance * healthy < inside)
    expected = min(failure.nodes, healthy) * inside / healthy
    whole = int(expected)
    return min(inside, whole + (failure.chance < expected - whole))
