"""Random schedules: a pure function of the seed and the other arguments, the same on every machine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from recover.faults.fault import BY_CLOCK, IN_GRADIENT, IN_RESULT, OF_DEVICE, Fault
from recover.faults.locations import (
    ANYTIME,
    IN_INSTALMENTS,
    IN_RECOVERY,
    LOCATIONS,
    OUTSIDE,
    REPAIR_PHASES,
    VERIFIED,
)
from recover.faults.schedule import ScheduleError

EVERYWHERE: Mapping[str, float] = {
    location: 1.0 for location in LOCATIONS if location not in (*OUTSIDE, *VERIFIED, *IN_INSTALMENTS)
}
EVEN: Mapping[str, float] = {name: weight for name, weight in EVERYWHERE.items() if name != "checkpoint"}
KILLS: Mapping[str, float] = {"kill": 1.0}
BETWEEN_STEPS = ("hold",)  # inside a step, a rank that exceeds the hang limit is rightly fenced
MOMENT = 0.01  # seconds: the resolution of times in a schedule


def draw_schedule(
    replicas: int,
    replica_size: int,
    seed: int,
    *,
    count: int | None = None,
    steps: tuple[int, int] = (1, 1),
    mtbf: float | None = None,
    locations: Mapping[str, float] = EVEN,
    actions: Mapping[str, float] = KILLS,
) -> tuple[Fault, ...]:
    """Draw `count` faults in these steps, or as many as a mean of `mtbf` steps between failures
    gives.

    At least one replica survives. Faults at locations that only a recovery reaches (`repair`,
    `extra`) are put into the step of the fault before.
    """
    low, high = steps
    if not 1 <= low <= high:
        raise ScheduleError(f"steps {low}:{high} is no range; write FIRST:LAST, counted from 1, as 3:40")
    _check_grid(replicas, replica_size)
    if (count is None) == (mtbf is None):
        raise ScheduleError("give either a number of faults (--count) or a mean time between them (--mtbf)")
    rng = random.Random(f"{seed}/{replicas}/{replica_size}/{count}/{low}/{high}/{mtbf}")
    if mtbf is None:
        assert count is not None
        times = sorted(rng.randint(low, high) for _ in range(count))
    else:
        times = [int(low + at) for at in _arrivals(rng, mtbf, high - low + 1)]
    return tuple(_faults(rng, times, replicas, replica_size, locations, actions, strict=mtbf is None))


def draw_by_clock(
    replicas: int,
    replica_size: int,
    seed: int,
    *,
    mtbf: float,
    count: int | None = None,
    actions: Mapping[str, float] = KILLS,
) -> tuple[Fault, ...]:
    """Draw faults with a mean of `mtbf` seconds between them, until `count` are drawn or one
    replica is left."""
    _check_grid(replicas, replica_size)
    for action in actions:
        if action.partition(":")[0] not in BY_CLOCK:
            raise ScheduleError(
                f"action {action!r} needs a place, and by the clock there is none; use --steps"
            )
    rng = random.Random(f"{seed}/{replicas}/{replica_size}/{count}/{mtbf}s")
    mortal, at = _shuffled(rng, replicas), 0.0
    found: list[Fault] = []
    while len(mortal) > 1 and (count is None or len(found) < count):
        at += max(MOMENT, rng.expovariate(1 / mtbf))
        action = _pick(rng, actions)
        fault = Fault(0, mortal[0], ANYTIME, rng.randrange(replica_size), action=action, after=round(at, 2))
        found.append(fault)
        if fault.lethal:
            mortal.pop(0)
        elif count is None and len(found) >= replicas:
            break
    return tuple(found)


def _faults(
    rng: random.Random,
    times: list[int],
    replicas: int,
    replica_size: int,
    locations: Mapping[str, float],
    actions: Mapping[str, float],
    strict: bool,
) -> Iterator[Fault]:
    mortal, last, drifted = _shuffled(rng, replicas), None, False
    struck: set[tuple[int, int]] = set()
    for number, step in enumerate(times, start=1):
        action = _pick(rng, actions)
        if action == "corrupt:weights":
            # At most one replica drifts, and only where the others stay a majority, whichever of them die.
            if drifted or len(mortal) - 1 - (len(times) - number) < 2:
                action = "kill"
            drifted = True
        victim = next((replica for replica in mortal if (step, replica) not in struck), mortal[0])
        fault = Fault(step, victim, _pick(rng, locations), rng.randrange(replica_size), action=action)
        if fault.lethal and len(mortal) == 1:
            if strict:
                raise ScheduleError(
                    f"{len(times)} faults would leave none of {replicas} replicas; lower --count, or add replicas"
                )
            return  # a rate promises no number of faults: the last replica survives
        if action in IN_GRADIENT:
            fault = replace(fault, location="bucket")
        elif action in IN_RESULT:
            fault = replace(fault, location="reduced")
        elif fault.kind in OF_DEVICE:
            fault = replace(fault, location="forward")
        elif fault.kind in BETWEEN_STEPS or action == "corrupt:weights":
            fault = replace(fault, location="advance")
        elif fault.location in IN_RECOVERY:
            if last and _calls_for_work(last) and (last.step, victim) not in struck:
                phase = rng.choice(REPAIR_PHASES) if fault.location == "repair" else None
                fault = replace(fault, step=last.step, detail=phase)
            else:
                fault = replace(fault, location="in-reduce")  # which causes a recovery for the next fault
        mortal.remove(victim)
        if not fault.lethal:  # it survives, and the next fault may strike another replica
            mortal.insert(rng.randint(0, len(mortal)), victim)
        struck.add((fault.step, victim))
        last = fault
        yield fault


def _calls_for_work(fault: Fault) -> bool:
    """Whether the step of the fault is repaired, with microbatches to run again."""
    return fault.lethal and fault.location in ("forward", "backward", "bucket", "in-reduce")


def _arrivals(rng: random.Random, mean: float, end: float) -> Iterator[float]:
    at = rng.expovariate(1 / mean)
    while at < end:
        yield at
        at += rng.expovariate(1 / mean)


def _shuffled(rng: random.Random, replicas: int) -> list[int]:
    order = list(range(replicas))
    rng.shuffle(order)
    return order


def _pick(rng: random.Random, weights: Mapping[str, float]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def _check_grid(replicas: int, replica_size: int) -> None:
    if replicas < 1 or replica_size < 1:
        raise ScheduleError(
            f"{replicas} replicas of {replica_size} ranks is no world; both must be 1 or more"
        )
