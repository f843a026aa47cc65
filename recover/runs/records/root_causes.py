"""Which rank died first, and why: from what dead ranks left behind and what the launcher saw (`job.jsonl`).

A rank that exited because another rank of its replica had died is never a root cause. In each lost replica, the first
of the other ranks is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from recover.runs.records.causes import AGREED, Cause, Launched, cause_of, is_orphan, lost_host
from recover.runs.records.kinds import Line
from recover.runs.records.rank_ends import left_on_notice, went_well


@dataclass(frozen=True)
class Death:
    """The end of one rank. `because_of`: the rank that it followed, or None if it is a root cause."""

    rank: int
    replica: int
    at: float | None
    cause: Cause
    because_of: int | None = None
    step: int = 0
    doing: str = ""
    slots: tuple[int, ...] = ()

    def facts(self) -> dict[str, Any]:
        """The death as JSON."""
        return {
            "rank": self.rank,
            "replica": self.replica,
            "at": self.at,
            "cause": self.cause.kind,
            "short": self.cause.short,
            "text": self.cause.text,
            "advice": self.cause.advice,
            "because_of": self.because_of,
            "step": self.step,
            "doing": self.doing,
        }


@dataclass(frozen=True)
class Story:
    """All facts about one incident, root causes first."""

    number: int  # from 1 on, in the order of `incidents.jsonl`; then losses without a line
    incident: Line | None  # None: the step was never committed, or the loss was in no step
    deaths: list[Death] = field(default_factory=list)

    @property
    def first(self) -> list[Death]:
        """The root causes, ordered by time: at most one per lost replica."""
        return [death for death in self.deaths if death.because_of is None]

    @property
    def seen(self) -> bool:
        """Whether the launcher saw any of these deaths."""
        return any(death.at is not None for death in self.deaths)

    @property
    def short(self) -> str:
        """`rank 1 killed by SIGKILL`; all of them if several were first; "" if no rank was lost."""
        by_cause: dict[str, list[int]] = {}
        for death in self.first:
            by_cause.setdefault(death.cause.short, []).append(death.rank)
        return "; ".join(f"{_ranks(ranks)} {short}" for short, ranks in by_cause.items())


def stories(incidents: Sequence[Line], job: Sequence[Line]) -> list[Story]:
    """A story for every incident with losses, and one for the losses of the last launch that have no incident."""
    told, found = set[tuple[int, int]](), list[Story]()
    launched = _launched(job)
    for number, incident in enumerate(incidents, 1):
        launch = _launch_of(incident, launched)
        dead = incident.get("dead_ranks") or []
        exits = {line["rank"]: line for line in launch.exits if line["rank"] in dead}
        for rank in dead:
            if why := (incident.get("evicted") or {}).get(str(rank // launch.replica_size)):
                exits[rank] = {"rank": rank, **exits.get(rank, {}), "evicted": why}
        told |= {(launch.number, rank) for rank in dead}
        if dead:
            found.append(Story(number, incident, _deaths(dead, exits, launch)))
    last = launched[-1]
    rest = {
        line["rank"]: line
        for line in last.exits
        if (last.number, line["rank"]) not in told
        and not went_well(line)
        and not left_on_notice(line)
        and _said_at(line) <= last.ending
    }
    if rest:
        found.append(Story(len(incidents) + 1, None, _deaths(sorted(rest), rest, last)))
    return found


def _launched(job: Sequence[Line]) -> list[Launched]:
    found = [Launched(0, {})]
    for line in job:
        if line["what"] == "start":
            found.append(Launched(len(found), line))
        elif line["what"] == "exit":
            found[-1].exits.append(line)
        elif line["what"] == "heard":
            for rank in line["lost_ranks"]:
                found[-1].heard.setdefault(rank, line)
        elif line["what"] == "ending":
            found[-1].ending = line["at"]
    return found


def _launch_of(incident: Line, launched: Sequence[Launched]) -> Launched:
    """The last launch that began before the incident; the last one of all if the incident has no time."""
    at = incident.get("at", float("inf"))
    return max(
        (launch for launch in launched if launch.start.get("at", 0.0) <= at), key=lambda one: one.number
    )


def _said_at(line: Line) -> float:
    """When a rank announced its end. With a GPU it may take seconds to exit afterwards."""
    return float(line.get("words", {}).get("at", line["at"]))


def _deaths(dead: Sequence[int], exits: dict[int, Line], launch: Launched) -> list[Death]:
    size = launch.replica_size
    seen = {rank: _known(rank, exits, launch) for rank in dead}
    order = sorted(dead, key=lambda rank: (seen[rank].get("at", float("inf")), rank))
    culprits: dict[int | str, int] = {}  # by replica, or by the lost host

    def lost_with(rank: int) -> int | str:
        return lost_host(seen[rank]) or rank // size

    for rank in order:
        if not is_orphan(seen[rank]):
            culprits.setdefault(lost_with(rank), rank)
            culprits.setdefault(rank // size, rank)
    noted = [rank for rank in order if seen[rank].get("note")]
    deaths = []
    for rank in order:
        line, culprit = seen[rank], culprits.get(lost_with(rank))
        because = culprit if culprit not in (rank, None) else None
        if line.get("words", {}).get("kind") in AGREED and noted and noted[0] != rank:
            because = noted[0]
        if is_orphan(line) and because is None:
            because = -1  # because of a replica peer whose end is not known
        cause = cause_of(line, launch, [seen[other] for other in order])
        at, slots = line.get("at"), tuple(line.get("slots", ()))
        deaths.append(
            Death(rank, rank // size, at, cause, because, line.get("step", 0), line.get("doing", ""), slots)
        )
    return deaths


def _known(rank: int, exits: dict[int, Line], launch: Launched) -> Line:
    """Observations of its end, and reports of other agents."""
    heard = launch.heard.get(rank)
    known: Line = {"rank": rank} if heard is None else {"rank": rank, "at": heard["at"], "heard": heard}
    known |= exits.get(rank, {})
    return known | {"at": heard["at"]} if heard is not None and lost_host(known) else known


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
