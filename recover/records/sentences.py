"""A repair in one sentence, for the person at the terminal."""

from __future__ import annotations

from recover.records.kinds import IncidentRecord, StepRecord


def sentence(incident: IncidentRecord, step: StepRecord | None, global_batch: int, cause: str = "") -> str:
    """Who, where in the step, why, how long the repair took, what was redone, and what the step was committed on."""
    dead = incident["dead_replicas"]
    who = f"replica{'s' if len(dead) > 1 else ''} {', '.join(map(str, dead))}"
    where = f"{incident['location']}: {cause}" if cause else incident["location"]
    what = f"lost {who} ({where})" if dead else "a replica left its step early, nobody is lost"
    text = f"step {incident['step']}: {what}; repaired in {incident['repair_ms']:.0f} ms"
    extra = incident["extra_microbatches"]
    if extra:
        plural = "es" if extra > 1 else ""
        again = "run again" if incident["redone_microbatches"] else "run in their place"
        text += f", {extra} microbatch{plural} {again}"
    else:
        text += ", nothing to run again"
    if step is None:
        return text + "; every step was committed already"
    return (
        text + f"; committed with {step['microbatches']} of {global_batch} on {in_replicas(step['replicas'])}"
    )


def in_replicas(number: int) -> str:
    return f"{number} replica{'' if number == 1 else 's'}"
