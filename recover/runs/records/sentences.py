"""A repair in one sentence, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recover.runs.records.kinds import IncidentRecord, StepRecord

_BROKEN_OFF = (
    "sums were broken off (a replica has left its step early, or trains other parameters than before)"
)


def sentence(incident: IncidentRecord, step: StepRecord | None, global_batch: int, cause: str = "") -> str:
    """A sentence on an incident: the loss, its place and cause, the repair, the redone work, the committed batch."""
    dead = incident["dead_replicas"]
    if left := incident.get("left_replicas"):
        also = f", lost {_those(dead)}{f' ({cause})' if cause else ''}" if dead else ""
        on = f"; {step['microbatches']} of {global_batch} on {in_replicas(step['replicas'])}" if step else ""
        return (
            f"step {incident['step']}: {_those(left)} left on notice{also}; the others waited "
            f"{incident['repair_ms']:.0f} ms, nothing to run again{on}"
        )
    if came := incident.get("joined_replicas"):
        also = f", lost {_those(dead)}{f' ({cause})' if cause else ''}" if dead else ""
        on = f"; {step['microbatches']} of {global_batch} on {in_replicas(step['replicas'])}" if step else ""
        size = f"{incident['transfer_bytes'] / 2**20:.1f} MiB of state"
        if steps := incident.get("joining_steps"):
            return (
                f"step {incident['step']}: {_those(came)} joined{also}; {size} came over {steps} steps, and the others "
                f"waited {incident['stall_ms']:.0f} ms{on}"
            )
        return (
            f"step {incident['step']}: {_those(came)} joined{also}; the others waited {incident['stall_ms']:.0f} ms, "
            f"{incident['transfer_ms']:.0f} of them for {size}{on}"
        )
    where = f"{incident['location']}: {cause}" if cause else incident["location"]
    if evicted := incident.get("evicted"):
        told = "; ".join(f"{_those([int(replica)])} was evicted: {why}" for replica, why in evicted.items())
        where = incident["location"] if cause and "was evicted: " in cause else where
        where = f"{where}: {told}"
    wrong = wrong_sums(incident)
    what = f"lost {_those(dead)} ({where})" if dead else f"no replica is lost, but {wrong or _BROKEN_OFF}"
    what += f", and {wrong}" if dead and wrong else ""
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


def wrong_sums(incident: Mapping[str, Any]) -> str:
    """The ranks whose reduced sums were wrong, in words; "" if there were none. All sums were reduced again."""
    ranks: Sequence[str] = incident.get("wrong_sums") or ()
    return f"the reduced sums of {', '.join(ranks)} were wrong, and all were reduced again" if ranks else ""


def _those(replicas: Sequence[int]) -> str:
    return f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas))}"


def in_replicas(number: int) -> str:
    return f"{number} replica{'' if number == 1 else 's'}"
