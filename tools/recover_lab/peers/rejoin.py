"""Cost of a rejoin: from the death of a replica until all are in a step again, and the wait of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from statistics import median
from typing import Any

from recover.runs.records.kinds import Event
from recover_lab.peers.ended import BenchmarkError
from recover_lab.peers.metrics import failures


@dataclass(frozen=True)
class RejoinTimes:
    """Seconds from a death."""

    again: float  # until the next commit
    whole: float  # until a commit with as many replicas as before
    wait: float  # of the others: the longest pause between two commits, less the median

    def to_json(self) -> dict[str, float]:
        return {name: round(seconds, 4) for name, seconds in vars(self).items()}


def rejoin_times(events: Sequence[Event], is_whole: Callable[[Event], bool]) -> RejoinTimes:
    """The times after the first death of a run. `is_whole` says of a committed step whether all replicas were in it."""
    died = failures(events)[0]["at"]
    steps: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        if event["what"] == "step-end" and event["at"] > died:
            steps.setdefault((event["life"], event["step"]), []).append(event)
    ends = sorted((max(each["at"] for each in step), all(map(is_whole, step))) for step in steps.values())
    if not all(all_in for _, all_in in ends):
        # A replica may die just after its vote: the others still commit with it.
        ends = list(dropwhile(lambda end: end[1], ends))
    whole = next((at for at, all_in in ends if all_in), None)
    if whole is None:
        raise BenchmarkError("the lost replica has not rejoined")
    commits = [at for at, _ in ends if at <= whole]
    pauses = [later - before for before, later in pairwise(commits)]
    wait = max(pauses) - median(pauses) if len(pauses) > 1 else 0.0
    return RejoinTimes(commits[0] - died, whole - died, wait)


STAGES = ("placed", "imports", "builds", "rehearses", "joins")


def stages(events: Sequence[Event]) -> dict[str, float]:
    """Seconds by stage of our run with one rejoin, from the death to the first step with the new replica."""
    came = max(event["rank"] for event in events)
    at = {event["what"]: event["at"] for event in reversed(events) if event["rank"] == came}
    (join,) = joins(events)
    asked = at["start"] + join["warm_up"]
    stamps = [
        failures(events)[0]["at"],
        at["start"],
        at["imported"],
        at["built"],
        asked,
        at["step-end"],
    ]
    return {name: later - before for name, (before, later) in zip(STAGES, pairwise(stamps), strict=True)}


def joins(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Each join of our run, as noted by the member that waited longest."""
    joined: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["what"] == "step-end":
            for incident in event["incidents"]:
                # The joining replica notes it, too, with a stall of 0.
                if incident["kind"] == "joined":
                    joined.setdefault(event["step"], []).append(incident)
    return [max(told, key=lambda incident: incident["stall"]) for told in joined.values()]
