"""Goodput: the part of all GPU time since the start that went into committed steps, and what the rest was spent on.

All time of all ranks, from the start of a launch to its end, is attributed in whole milliseconds, so that the parts
add up to the total exactly. docs/guides/monitoring.md explains each part. Only records are read.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recover.runs.records.feed import with_incidents
from recover.runs.records.incident_times import redone
from recover.runs.records.kinds import Line

# Parts of the time with their descriptions; the first two are productive.
PARTS = {
    "computing": "computing microbatches that were committed",
    "exchange": "reduction, vote and update",
    "start_up": "start-up",
    "waiting": "waiting for slower replicas",
    "detection": "until a loss was noticed",
    "repair": "repair",
    "redone": "restored and redone microbatches",
    "transfer": "transfer to joiners",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "outside": "outside of steps, in the script",
    "rolled_back": "end of a launch, and what was rolled back with it",
    "lost_capacity": "capacity of lost replicas",
}
PRODUCTIVE = ("computing", "exchange")
USUAL = 64  # undisturbed steps from which the usual time of an exchange is taken


@dataclass(frozen=True)
class LaunchTime:
    """One start of the job; a resumed run has several."""

    started: float  # seconds since 1970, as all times here
    replicas: int = 0  # at its start; 0: not known
    replica_size: int = 1
    ended: float | None = None


@dataclass
class TimeAccount:
    """Attributes all time of all ranks. `add` takes the committed steps in order; `report` gives the account at any
    moment."""

    launches: Sequence[LaunchTime] = ()
    replicas: int = 0  # at the start, if no launch is recorded
    parts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))  # milliseconds of ranks
    total: int = 0
    _launch: int = -1  # the launch of the last step
    _at: int = 0  # all time before this moment is attributed, in milliseconds
    _alive: int = 0
    _calm: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL))

    def add(self, line: Line, incidents: Iterable[Line] = ()) -> None:
        """Add the next committed step, with the incidents that were repaired in it."""
        seconds = _ms(1e3 * line.get("seconds", 0.0))
        # Runs of older versions record only how long a step took.
        at = _ms(1e3 * line["at"]) if "at" in line else self._at + seconds
        first = self._begin(at, at - seconds)
        replicas = max(1, line.get("replicas", 1))
        self._alive = replicas
        left, incidents = max(0, at - self._at), list(incidents)
        self._at += left
        start_up = max(0, left - seconds) if first else 0
        left = self._lose_capacity(left, replicas)
        for name, spent in {
            "start_up": start_up,
            "checkpoint": line.get("checkpoint_ms", 0),
            "evaluation": line.get("evaluation_ms", 0),
            "outside": line.get("outside_ms", 0),
            "repair": sum(i.get("repair_ms") or 0 for i in incidents),
            "transfer": sum(i.get("transfer_ms") or 0 for i in incidents),
            "redone": sum(redone(i) for i in incidents),
        }.items():
            taken = min(left, _ms(spent))
            self._give(name, taken * replicas)
            left -= taken
        rest = left * replicas
        for name, spent in (("computing", line.get("compute_ms", 0)), ("waiting", line.get("wait_ms", 0))):
            taken = min(rest, _ms(spent))
            self._give(name, taken)
            rest -= taken
        exchange = min(rest, self._usual_exchange(rest, replicas, incidents))
        self._give("exchange", exchange)
        self._give("detection", rest - exchange)
        if not first and not incidents:
            self._calm.append(rest / replicas)

    def report(self, until: float | None = None) -> dict[str, Any]:
        """The account up to the last step, or up to `until`, as in `summary.json`."""
        parts, total = dict(self.parts), self.total
        if until is not None and self._launch >= 0:
            kept = (self.parts, self.total, self._at)
            self.parts = parts
            self._end(_ms(1e3 * until))
            total = self.total
            self.parts, self.total, self._at = kept
        good = sum(parts[name] for name in PRODUCTIVE)
        return {
            "goodput": round(good / total, 6) if total else 0.0,
            "total_ms": total,
            "parts_ms": parts,
            **({} if until is None else {"until": round(until, 3)}),
        }

    def _begin(self, at: int, began: int) -> bool:
        """Whether this step is the first of a launch. If so, the rest of the launch before is attributed first."""
        due = max((n for n, launch in enumerate(self.launches) if _ms(1e3 * launch.started) <= at), default=0)
        if due == self._launch:
            return False
        if self._launch >= 0:
            ended = self._of().ended
            self._end(self._at if ended is None else _ms(1e3 * ended))
        self._launch = due
        self._at = _ms(1e3 * self._of().started) if self.launches else began
        return True

    def _of(self) -> LaunchTime:
        return self.launches[self._launch] if self.launches else LaunchTime(0.0)

    def _end(self, at: int) -> None:
        left = max(0, at - self._at)
        self._at += left
        self._give("rolled_back", self._lose_capacity(left, self._alive) * self._alive)

    def _lose_capacity(self, left: int, replicas: int) -> int:
        self._give("lost_capacity", left * max(0, (self._of().replicas or self.replicas) - replicas))
        return left

    def _give(self, name: str, replica_ms: int) -> None:
        if replica_ms:
            size = self._of().replica_size
            self.parts[name] += replica_ms * size
            self.total += replica_ms * size

    def _usual_exchange(self, rest: int, replicas: int, incidents: Sequence[Line]) -> int:
        """The usual time of an exchange, for a step with a loss: the rest of its time went into detecting the
        loss."""
        if not any(incident.get("dead_ranks") for incident in incidents):
            return rest
        if self._calm:
            return _ms(statistics.median(self._calm) * replicas)
        return max(0, rest - _ms(sum(i.get("detect_ms") or 0 for i in incidents)) * replicas)


def account(
    steps: Iterable[Line],
    incidents: Iterable[Line],
    launches: Sequence[LaunchTime] = (),
    until: float | None = None,
    replicas: int = 0,
) -> dict[str, Any]:
    """The account of a whole run."""
    whole = TimeAccount(launches, replicas)
    for line, inside in with_incidents(steps, deque(sorted(incidents, key=lambda line: line["step"]))):
        whole.add(line, inside)
    return whole.report(until)


def shares(told: Mapping[str, Any]) -> dict[str, float]:
    """The parts, as fractions of the total."""
    total = told["total_ms"]
    return {name: spent / total if total else 0.0 for name, spent in told["parts_ms"].items()}


def _ms(value: float) -> int:
    return round(value)
