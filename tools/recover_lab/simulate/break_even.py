"""The rates of failures at which one system overtakes another, and the value of changes such as more spares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from recover_lab.confidence import mean_interval
from recover_lab.simulate.race import SystemResult, race
from recover_lab.simulate.scenario import Scenario
from recover_lab.simulate.scenario_keys import DAY

FACTORS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # times the scenario's rate of failures
FEW_SEEDS, FEWEST_FAILURES, MOST_FAILURES = 5, 40, 300  # of each point of a curve
_ROUNDING = 1e-9  # of goodput: a smaller difference is one of rounding
_EVEN_SEEDS, _EVEN_FAILURES = 8, 40  # of each rate of a break-even
_DECADES, _HALVINGS = (
    4,
    6,
)  # searched below the scenario's rate; each halving halves the exponent that is left
_LARGEST_ACCUM, _LARGER_STEPS = (
    64,
    16,
)  # of the steps of a break-even: that many microbatches or times as many
_LARGEST_BATCH = 2**17  # microbatches of such a step


@dataclass(frozen=True)
class Curve:
    """Goodput of each system against one key."""

    key: str
    values: tuple[float, ...]
    goodput: dict[str, tuple[float, ...]]
    between: tuple[float, ...]  # seconds between failures
    seeds: dict[str, tuple[tuple[float, ...], ...]] = field(
        default_factory=dict
    )  # goodput of each seed, by value

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "values": self.values, "goodput": self.goodput, "between": self.between}


def quick(scenario: Scenario, **changes: Any) -> Scenario:
    """The same scenario, short enough to be run many times: few seeds, and days for some dozen to hundred failures."""
    other = scenario.but(**changes)
    failure = other.between_failures / DAY
    days = min(max(other.run.days, FEWEST_FAILURES * failure), max(0.1, MOST_FAILURES * failure))
    return other.but(run__days=days, run__seeds=min(other.run.seeds, FEW_SEEDS))


def curve(
    scenario: Scenario, key: str, values: Sequence[float], systems: Sequence[str] | None = None
) -> Curve:
    names = list(systems or scenario.systems)
    goodput: dict[str, list[float]] = {name: [] for name in names}
    seeds: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    between = []
    for value in values:
        other = quick(scenario, **{key.replace(".", "__"): value})
        between.append(other.between_failures)
        for name, result in race(other, names).items():
            goodput[name].append(result.goodput.mean)
            seeds[name].append(result.goodputs)
    return Curve(
        key,
        tuple(values),
        {name: tuple(row) for name, row in goodput.items()},
        tuple(between),
        {name: tuple(row) for name, row in seeds.items()},
    )


def rates(scenario: Scenario, systems: Sequence[str] | None = None) -> Curve:
    """Goodput from rare to permanent failures."""
    values = [factor * scenario.failures.per_node_day for factor in FACTORS]
    return curve(scenario, "failures.per_node_day", values, systems)


def signs(found: Curve, one: str, other: str) -> list[int]:
    """For each value of the curve: 1 where `one` is ahead of `other`, -1 where it is behind, 0 where the
    seeds show no difference."""
    places = []
    for place, (mine, theirs) in enumerate(zip(found.goodput[one], found.goodput[other], strict=True)):
        mean = low = high = mine - theirs
        if found.seeds:
            pairs = zip(found.seeds[one][place], found.seeds[other][place], strict=True)
            mean, low, high = mean_interval([a - b for a, b in pairs])
        shown = abs(mean) > _ROUNDING and not low <= 0 <= high
        places.append(0 if not shown else 1 if mean > 0 else -1)
    return places


def crossings(found: Curve, one: str, other: str) -> list[float]:
    """Values at which one system overtakes the other, interpolated in logarithms between those simulated.

    However small a difference is, it counts if all seeds together show it: the votes of every step are such a one.
    """
    gaps = [a - b for a, b in zip(found.goodput[one], found.goodput[other], strict=True)]
    shown = [(place, sign) for place, sign in enumerate(signs(found, one, other)) if sign]
    places = []
    for (first, sign), (last, next_sign) in pairwise(shown):
        if sign == next_sign:
            continue
        right = next(place for place in range(first + 1, last + 1) if sign * gaps[place] <= 0)
        part = gaps[right - 1] / (gaps[right - 1] - gaps[right])
        low, high = found.values[right - 1], found.values[right]
        places.append(math.exp(math.log(low) + part * math.log(high / low)))
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


def even_steps(scenario: Scenario, ours: str, theirs: str) -> tuple[int, int | None]:
    """Microbatches per replica between which `ours` overtakes `theirs`, at the scenario's rate of failures.

    The second is the fewest from which on `ours` yields more at every size tried, None if it does not at the largest.
    The first is the most below it at which `ours` does not, 0 if there is none. The same seeds for every size.
    """
    most = max(_LARGEST_ACCUM, _LARGER_STEPS * scenario.job.accum)
    sizes = [2**power for power in range(most.bit_length())]
    sizes = [size for size in sizes if size * scenario.replicas <= _LARGEST_BATCH] or [scenario.job.accum]
    days = min(scenario.run.days, MOST_FAILURES * scenario.between_failures / DAY)

    def yields_more(accum: int) -> bool:
        found = race(scenario.but(job__accum=accum, run__days=days), [ours, theirs])
        return found[ours].goodput.mean > found[theirs].goodput.mean

    ahead: int | None = None
    behind = 0
    for size in reversed(sizes):
        if not yields_more(size):
            behind = size
            break
        ahead = size
    while ahead is not None and behind and ahead - behind > 1:
        middle = (behind + ahead) // 2
        behind, ahead = (behind, middle) if yields_more(middle) else (middle, ahead)
    return behind, ahead


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
