"""The launches that a run consists of: where each begins, on how many replicas, and how many it lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recover.runs.records.goodput import LaunchTime
from recover.runs.records.kinds import Line


@dataclass
class LaunchPart:
    """The steps of one launch, as far as no later launch has taken them again."""

    first: int  # number of its first step
    replicas: int  # at its start; 0: not known
    lost: int = 0
    joined: int = 0
    left: int = 0  # on notice


class LaunchHistory:
    """Finds the launches of a run. `add` takes the committed steps in order."""

    def __init__(self, launches: Sequence[LaunchTime] = ()) -> None:
        self.launches = launches
        self._firsts: list[tuple[int, int]] = []  # number of a launch, and its first step

    def add(self, line: Line) -> None:
        at = line.get("at")
        # Records of older versions do not say when a step was committed.
        launch = 0 if at is None else sum(one.started <= at for one in self.launches)
        if not self._firsts or launch > self._firsts[-1][0]:
            self._firsts.append((launch, line["step"]))

    def parts(self, incidents: Iterable[Line], replicas: int = 0) -> list[LaunchPart]:
        """The launches with at least one step. `replicas`: at the start, if no launch is recorded."""
        found = [
            LaunchPart(first, self.launches[launch - 1].replicas if launch else replicas)
            for launch, first in self._firsts or [(min(1, len(self.launches)), 1)]
        ]
        for incident in incidents:
            part = next((part for part in reversed(found) if part.first <= incident["step"]), found[0])
            part.lost += len(incident.get("dead_replicas") or ())
            part.joined += len(incident.get("joined_replicas") or ())
            part.left += len(incident.get("left_replicas") or ())
        return found


def losses_in_words(parts: Sequence[LaunchPart]) -> str:
    """`1 of 4 replicas lost, resumed on 2`"""
    words = []
    for number, part in enumerate(parts):
        of = f" of {part.replicas}" if part.replicas else ""
        if number:
            words.append(f"resumed on {part.replicas}" if part.replicas else "resumed")
            if part.lost:
                words.append(f"{part.lost}{of} lost")
        elif part.lost:
            words.append(f"{part.lost}{of} replica{'s' if of or part.lost > 1 else ''} lost")
        else:
            words.append("no replica lost")
        if part.left:
            words.append(f"{part.left} left on notice")
        if part.joined:
            words.append(f"{part.joined} joined")
    return ", ".join(words)
