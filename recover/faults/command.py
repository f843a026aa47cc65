"""`recover faults make` and `recover faults check`, without their terminal output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from recover.faults.draw import EVEN, KILLS, draw_by_clock, draw_schedule
from recover.faults.fault import Fault, parse_fault
from recover.faults.locations import LOCATIONS
from recover.faults.schedule import (
    ScheduleError,
    impossible,
    read_schedule,
    survivors,
    write_schedule,
)


def make(
    replicas: int,
    replica_size: int,
    seed: int,
    count: int | None,
    steps: str,
    mtbf: str | None,
    locations: str | None,
    actions: str | None,
) -> str:
    """Draw a schedule; return it as YAML. Raises ScheduleError."""
    what = read_weights(actions, "action") if actions else KILLS
    for action in what:
        parse_fault(f"1:0:bucket={action}")
    if mtbf is not None and mtbf.endswith("s"):
        seconds = _number(mtbf[:-1], "--mtbf", mtbf)
        faults = draw_by_clock(replicas, replica_size, seed, mtbf=seconds, count=count, actions=what)
    else:
        where = read_weights(locations, "location") if locations else EVEN
        if unknown := [name for name in where if name not in LOCATIONS]:
            raise ScheduleError(
                f"--locations: there is no location {unknown[0]!r}; choose from {', '.join(LOCATIONS)}"
            )
        mean = None if mtbf is None else _number(mtbf, "--mtbf", mtbf)
        faults = draw_schedule(
            replicas,
            replica_size,
            seed,
            count=count,
            steps=read_range(steps, "--steps"),
            mtbf=mean,
            locations=where,
            actions=what,
        )
    return write_schedule(faults)


def check(
    path: Path, replicas: int | None, replica_size: int | None, steps: int | None
) -> tuple[tuple[Fault, ...], list[str]]:
    """The faults of a file, and all problems with them.

    Raises ScheduleError if it cannot be read.
    """
    faults = read_schedule(path)
    # A fault that names a joining replica is for a job with --return: assume as many joining
    # replicas as it needs.
    named = [(fault.joining_replica, fault.replica) for fault in faults if fault.joining_replica is not None]
    later = max((max(pair) + 1 for pair in named), default=0)
    problems = list(impossible(faults, replicas, replica_size, steps, later=later))
    if replicas is not None and not survivors(faults, replicas):
        problems.append(f"no replica would be left of {replicas}: the run would be lost; spare one of them")
    return faults, problems


def read_range(text: str, option: str) -> tuple[int, int]:
    """Read `3:40`, or one number for both ends."""
    low, colon, high = text.partition(":")
    try:
        return int(low), int(high if colon else low)
    except ValueError:
        raise ScheduleError(f"{option} {text!r} is no range; write FIRST:LAST, as 3:40") from None


def read_weights(text: str, kind: str) -> Mapping[str, float]:
    """Read `in-reduce=3,vote`: each with its weight, 1 if none is given."""
    weights = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        weights[name] = _number(weight or "1", f"the weight of {kind} {name!r}", weight)
    return weights


def _number(text: str, what: str, given: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ScheduleError(f"{what} is {given!r}; it must be a positive number")
    return value
