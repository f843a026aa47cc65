"""The times of an incident: phases of a loss, and the pause of a join."""

from __future__ import annotations

from recover.runs.records.kinds import Line

PHASES = ("detect", "repair", "restore", "redo")


def pause(incident: Line) -> float:
    """Milliseconds for which replicas that were not struck did not train: of a loss its phases, of a join the time
    that the others waited. (Records of older versions say for a join how long its whole step took, as `redo_ms`.)"""
    if incident.get("joined_replicas"):
        told = incident.get("stall_ms")
        return (
            told if told is not None else sum(incident.get(f"{p}_ms") or 0.0 for p in ("repair", "transfer"))
        )
    return sum(incident.get(f"{phase}_ms") or 0.0 for phase in PHASES)


def redone(incident: Line) -> float:
    """Milliseconds in which gradients were restored and microbatches run again."""
    spent = incident.get("restore_ms") or 0.0
    if incident.get("joined_replicas") and not incident.get("extra_microbatches"):
        return spent  # `redo_ms` of older versions is the step itself
    return spent + (incident.get("redo_ms") or 0.0)
