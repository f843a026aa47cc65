"""The rates of failures at which one system overtakes another, and the value of changes such as more spares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from recover_lab.simulate.race import SystemResult, race
from recover_lab.simulate.scenario import Scenario
from recover_lab.simulate.scenario_keys import DAY

FACTORS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # times the scenario's rate of failures
FEW_SEEDS, MOST_FAILURES = 5, 300  # of each point of a curve
_NOTHING = 0.003  # of goodput: a smaller difference is a tie
_EVEN_SEEDS, _EVEN_FAILURES = 8, 40  # of each rate of a break-even
_DECADES, _HALVINGS = (
    4,
    6,
)  # searched below the scenario's rate; each halving halves the exponent that is left


@dataclass(frozen=True)
class Curve:
    """Goodput of each system against one key."""

    key: str
    values: tuple[float, ...]
    goodput: dict[str, tuple[float, ...]]
    between: tuple[float, ...]  # seconds between failures

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "values": self.values, "goodput": self.goodput, "between": self.between}


def quick(scenario: Scenario, **changes: Any) -> Scenario:
    """The same scenario, short enough to be run many times: few seeds, and days for some hundred failures."""
    other = scenario.but(**changes)
    days = min(other.run.days, max(0.1, MOST_FAILURES * other.between_failures / DAY))
    return other.but(run__days=days, run__seeds=min(other.run.seeds, FEW_SEEDS))


def curve(
    scenario: Scenario, key: str, values: Sequence[float], systems: Sequence[str] | None = None
) -> Curve:
    names = list(systems or scenario.systems)
    goodput: dict[str, list[float]] = {name: [] for name in names}
    between = []
    for value in values:
        other = quick(scenario, **{key.replace(".", "__"): value})
        between.append(other.between_failures)
        for name, result in race(other, names).items():
            goodput[name].append(result.goodput.mean)
    return Curve(key, tuple(values), {name: tuple(row) for name, row in goodput.items()}, tuple(between))


def rates(scenario: Scenario, systems: Sequence[str] | None = None) -> Curve:
    """Goodput from rare to permanent failures."""
    values = [factor * scenario.failures.per_node_day for factor in FACTORS]
    return curve(scenario, "failures.per_node_day", values, systems)


def crossings(found: Curve, one: str, other: str) -> list[float]:
    """Values at which one system overtakes the other, interpolated in logarithms between those simulated."""
    gaps = [a - b for a, b in zip(found.goodput[one], found.goodput[other], strict=True)]
    places = []
    for (left, gap), (right, next_gap) in pairwise(zip(found.values, gaps, strict=True)):
        if gap * next_gap < 0 and max(abs(gap), abs(next_gap)) > _NOTHING:
            part = gap / (gap - next_gap)
            places.append(math.exp(math.log(left) + part * math.log(right / left)))
    return places


def break_even(scenario: Scenario, ours: str, theirs: str) -> float | None:
    """The lowest rate (failures per node and day) from which on `ours` yields more than `theirs`.

    0 if it yields more even where failures are rarest, None if it does so at no rate tried. Every rate is simulated
    for as many failures, with the same seeds.
    """
    factors = [10.0 ** (place / 2) for place in range(-_DECADES * 2, 5)]
    rate = scenario.failures.per_node_day

    def gap(factor: float) -> float:
        other = scenario.but(failures__per_node_day=factor * rate)
        days = _EVEN_FAILURES * other.between_failures / DAY
        found = race(other.but(run__days=days, run__seeds=_EVEN_SEEDS), [ours, theirs])
        return found[ours].goodput.mean - found[theirs].goodput.mean

    low = 0.0
    for high in factors:
        if gap(high) > 0:
            break
        low = high
    else:
        return None
    if not low:
        return 0.0
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if gap(middle) > 0 else (middle, high)
    return math.sqrt(low * high) * rate


def leaders(found: Curve) -> list[str]:
    """The best system at each value."""
    names = list(found.goodput)
    return [max(names, key=lambda name: found.goodput[name][place]) for place in range(len(found.values))]


@dataclass(frozen=True)
class Change:
    """The gain of a system by one change: tokens a day, as a share of those before."""

    what: str
    system: str
    gain: float


def value_of_changes(scenario: Scenario, systems: Sequence[str] | None = None) -> list[Change]:
    """Gains by more spares, faster detection, and restarts and rejoins in half of the time."""
    names = list(systems or scenario.systems)
    few = quick(scenario)
    spares = scenario.cluster.spares
    base = race(few, names)
    recovery, restart, leaving = scenario.recovery, scenario.restart, scenario.discarding
    changes: dict[str, dict[str, Any]] = {
        "1 spare node more": {"cluster__spares": spares + 1},
        "failures noticed ten times as fast": {
            "recovery__detect_s": recovery.detect_s / 10,
            "recovery__lease_s": recovery.lease_s / 10,
            "restart__detect_s": restart.detect_s / 10,
            "discarding__timeout_s": leaving.timeout_s / 10,
        },
        "restarting and rejoining twice as fast": {
            "restart__schedule_s": restart.schedule_s / 2,
            "restart__start_s": restart.start_s / 2,
            "restart__load_s": restart.load_s / 2,
            "joining__start_s": scenario.joining.start_s / 2,
            "discarding__start_s": leaving.start_s / 2,
        },
        "nodes repaired twice as fast": {"failures__repair_hours": scenario.failures.repair_hours / 2},
    }
    return [
        Change(what, name, _gain(base[name], result))
        for what, values in changes.items()
        for name, result in race(few.but(**values), names).items()
    ]


def _gain(before: SystemResult, after: SystemResult) -> float:
    return after.tokens_per_day.mean / before.tokens_per_day.mean - 1 if before.tokens_per_day.mean else 0.0
