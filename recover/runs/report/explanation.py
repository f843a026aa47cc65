"""`recover why`: which ranks were lost first, why, which followed because of them, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from recover.runs.records.incident_times import pause
from recover.runs.records.kinds import Line
from recover.runs.records.rank_ends import name_ranks
from recover.runs.records.root_causes import Death, Story, stories
from recover.runs.records.sentences import wrong_sums
from recover.runs.report.recorded_runs import Run
from recover.runs.report.wording import PHASES, milliseconds, victims


def tell(run: Run, number: int | None = None) -> list[str]:
    """All incidents of a run, or the one with this number, as lines."""
    found = stories(run.incidents, run.job)
    if number is not None:
        known = ", ".join(str(story.number) for story in found) or "none"
        found = [story for story in found if story.number == number]
        if not found:
            raise ValueError(
                f"{run.name} has no incident {number} in which somebody was lost; it has {known}"
            )
    held = [_held(line) for line in run.job if line["what"] == "held"] if number is None else []
    if number is None:
        held = [_left(incident) for incident in run.incidents if incident.get("left_replicas")] + held
        held = [_wrong_sums(incident) for incident in run.incidents if incident.get("wrong_sums")] + held
    if not found:
        return [f"{run.name}: no rank was lost", *held]
    lines: list[str] = []
    for story in found:
        lines += ["", *_of(story)] if lines else _of(story)
    return [*lines, *held]


def _left(incident: Line) -> str:
    who = victims(incident | {"dead_replicas": []})[1:]
    return f"step {incident['step']}: {who} left on notice ({name_ranks(incident['left_ranks'])}), as asked"


def _wrong_sums(incident: Line) -> str:
    return (
        f"step {incident['step']}: {wrong_sums(incident)}; if it happens again, test the devices and the network "
        "cards of these ranks"
    )


def as_json(run: Run, number: int | None = None) -> list[dict[str, Any]]:
    """All incidents of a run, or the one with this number, as objects. Raises ValueError if it does not exist."""
    tell(run, number)  # raises ValueError if it does not exist
    return [
        {
            "incident": story.number,
            "record": story.incident,
            "first": [death.facts() for death in story.first],
            "followed": [death.facts() for death in story.deaths if death.because_of is not None],
        }
        for story in stories(run.incidents, run.job)
        if number in (None, story.number)
    ]


def _of(story: Story) -> Iterator[str]:
    record = story.incident
    if record is None:
        yield f"incident {story.number}: lost, and no committed step tells of it"
    else:
        yield f"incident {story.number}: step {record['step']}, lost {victims(record)}"
    for number, death in enumerate(story.first):
        word = "first" if number == 0 else "then, by itself,"
        yield f"  {word} rank {death.rank} (replica {death.replica}) at {moment(death.at)}{_did(death)}"
        first, *more = death.cause.text.splitlines()
        yield f"    why: {first}"
        yield from (f"      {line}" for line in more)
        yield f"    what to do: {death.cause.advice}"
    if not story.first:
        yield "  first: unknown; only ranks that followed others have left anything"
    for death in story.deaths:
        if death.because_of is not None:
            whom = (
                f"because of rank {death.because_of}"
                if death.because_of >= 0
                else "after another rank of its replica"
            )
            yield f"  followed: rank {death.rank} at {moment(death.at)}, {whom}: {death.cause.text.splitlines()[0]}"
    if record is not None and record.get("joined_replicas"):
        yield f"  replicas joined in the same repair: the others waited {milliseconds(pause(record))}"
    elif record is not None:
        spans = [
            f"{name.removesuffix('_ms')} {milliseconds(record[name])}" for name in PHASES if record.get(name)
        ]
        yield f"  it took: {', '.join(spans) or 'no time'}"


def _held(line: Line) -> str:
    if not line["why"]:
        return f"from {moment(line['at'])} on, lost replicas were started again"
    return f"from {moment(line['at'])} on, lost replicas were not started again: {line['why']}"


def moment(at: float | None) -> str:
    """A time of day to the millisecond, by the clock of the host."""
    if at is None:
        return "an unknown time"
    return datetime.fromtimestamp(at).isoformat(sep=" ", timespec="milliseconds")


def _did(death: Death) -> str:
    if not death.doing:
        return ""
    slots = f" slot {', '.join(map(str, death.slots))}" if death.slots else ""
    return f", {death.doing}{slots}" + (f" in step {death.step}" if death.step else "")
