"""Runs and incidents in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recover.runs.records.incident_times import pause
from recover.runs.records.kinds import Line
from recover.runs.records.launch_history import losses_in_words
from recover.runs.records.root_causes import stories
from recover.runs.records.sentences import wrong_sums
from recover.runs.report.recorded_runs import Run

PHASES = {
    "detect_ms": "to come to the repair",
    "repair_ms": "to repair the world",
    "restore_ms": "to restore the gradients",
    "redo_ms": "to make up for what was lost",
}


def title(run: Run) -> str:
    """A run in one line."""
    if not run.steps:
        return f"{run.name}: no step committed yet"
    batches = sorted({line["microbatches"] for line in run.steps if "microbatches" in line})
    on = ""
    if len(batches) == 1:
        on = f", every one on exactly {batches[0]} microbatches"
    elif batches:
        on = f", on {batches[0]} to {batches[-1]} microbatches"
    return f"{run.name}: {many(len(run.steps), 'step')}{on}, {losses(run)}"


def losses(run: Run) -> str:
    """`1 of 4 replicas lost, resumed on 2`"""
    return losses_in_words(run.launch_parts)


def sentences(run: Run, incident: Line) -> str:
    """Sentences on an incident: the loss, its place, its cost, the committed batch; or replicas that joined."""
    if incident.get("joined_replicas"):
        return _of_joined(incident)
    if incident.get("left_replicas"):
        return _of_left(incident)
    if incident.get("wrong_sums") and not incident.get("dead_ranks"):
        wrong = _capital(wrong_sums(incident))
        return f"{wrong} in step {incident['step']}. {_committed(run, incident)}"
    who = victims(incident)
    was = "were" if len(incident.get("dead_replicas") or incident.get("dead_ranks") or ()) > 1 else "was"
    where = incident.get("location")
    text = [f"{_capital(who)} {was} lost in step {incident['step']}{f' ({where})' if where else ''}."]
    if cause := next(
        (s.short for s in stories(run.incidents, run.job) if s.seen and s.incident is incident), ""
    ):
        text.append(f"{_capital(cause)}.")

    spans = {key: incident.get(key) or 0 for key in PHASES}
    if told := [f"{milliseconds(spans[key])} {what}" for key, what in PHASES.items() if spans[key] >= 0.05]:
        text.append(f"It took {enumeration(told)}.")

    text += [_work(incident), _committed(run, incident)]
    return " ".join(filter(None, text))


def _work(incident: Line) -> str:
    redone = incident.get("redone_microbatches", 0)
    # Microbatches in place of lost ones, but with other samples.
    fresh = incident.get("extra_microbatches", 0) - redone
    work = []
    if redone:
        work.append(f"survivors redid {many(redone, 'microbatch', 'microbatches')}")
    if fresh > 0:
        work.append(f"survivors ran {many(fresh, 'extra microbatch', 'extra microbatches')}")
    return _capital(" and ".join(work) or "no microbatch had to be run again") + "."


def _committed(run: Run, incident: Line) -> str:
    committed = next((line for line in run.steps if line["step"] == incident["step"]), None)
    if committed is None:
        return "The step was not committed."
    if "microbatches" not in committed:
        return ""
    return f"The step was committed with {committed['microbatches']} of {run.global_batch} microbatches."


def _of_joined(incident: Line) -> str:
    came = incident["joined_replicas"]
    where = f" on {enumeration(incident['hosts'])}" if incident.get("hosts") else ""
    text = [f"{_capital(_numbered('replica', came))} joined{where} before step {incident['step']}."]
    if incident.get("dead_replicas"):
        lost = _numbered("replica", incident["dead_replicas"])
        text.append(f"In the same repair the others found that {lost} had been lost.")
    spans = [
        (incident.get("warm_up_ms") or 0, "to warm up, while the others trained"),
        (incident.get("repair_ms") or 0, "to be admitted"),
        (incident.get("transfer_ms") or 0, "to be given the state"),
    ]
    text.append(f"It took {enumeration([f'{milliseconds(span)} {what}' for span, what in spans])}.")
    text.append(f"The others waited for {milliseconds(pause(incident))}.")
    return " ".join(text)


def _of_left(incident: Line) -> str:
    text = [
        f"{_capital(_numbered('replica', incident['left_replicas']))} left on notice before step {incident['step']}.",
        f"The others waited for {milliseconds(pause(incident))}, and no microbatch had to be run again.",
    ]
    if incident.get("dead_replicas"):
        lost = _numbered("replica", incident["dead_replicas"])
        text.append(f"In the same repair the others found that {lost} had been lost.")
    return " ".join(text)


def stragglers(run: Run) -> list[str]:
    """Which replicas were slow, by how much at most, and when."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in run.steps:
        for replica, factor in (line.get("stragglers") or {}).items():
            found.setdefault(replica, []).append((line["step"], factor))
    return [
        f"Replica {replica} took up to {max(factor for _, factor in seen):.3g} times as long for a microbatch as the "
        f"others (steps {seen[0][0]} to {seen[-1][0]})."
        for replica, seen in sorted(found.items())
    ]


def victims(incident: Line) -> str:
    """`replica 1`, or the ranks if no replica was recorded; `+replica 4` for one that joined, `-replica 4` for one
    that left on notice."""
    if came := incident.get("joined_replicas"):
        lost = incident.get("dead_replicas")
        return f"+{_numbered('replica', came)}" + (f", {_numbered('replica', lost)}" if lost else "")
    if left := incident.get("left_replicas"):
        lost = incident.get("dead_replicas")
        return f"-{_numbered('replica', left)}" + (f", {_numbered('replica', lost)}" if lost else "")
    if replicas := incident.get("dead_replicas"):
        return _numbered("replica", replicas)
    if ranks := incident.get("dead_ranks"):
        return _numbered("rank", ranks)
    return "a rank"


def milliseconds(value: float) -> str:
    return (
        f"{value / 1000:.1f} s" if value >= 1000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
    )


def quantity(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    )


def many(number: int, one: str, more: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def enumeration(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _numbered(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {enumeration([str(number) for number in numbers])}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
