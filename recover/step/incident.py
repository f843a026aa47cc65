"""What one repair meant for the step it struck."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from recover.job.grid import Grid
from recover.policy import RestoreMode
from recover.world.census import Census


@dataclass
class Incident:
    step: int
    epoch: int
    dead_ranks: tuple[int, ...]
    dead_replicas: tuple[int, ...]
    complete: bool  # every survivor had the whole sum already: committed as it was
    boundary: bool
    restore: RestoreMode
    extra_microbatches: int  # run afresh, over all survivors
    discarded_microbatches: int  # in the survivors' hands, and left out
    noticed_at: float  # time.time() at which this rank first knew
    noticed_in: str  # where in the step it was then: advance, backward, in-reduce, vote or extra
    detect_ms: float  # from then until the repair began: what was dealt is finished first
    repair_ms: float
    restore_ms: float = 0.0
    redo_ms: float = 0.0
    evicted: tuple[int, ...] = ()  # the dead replicas that the others went on without
    reasons: dict[int, str] = field(default_factory=dict)  # why, by replica
    # Of replicas that have come and hold the state of the others now, if any.
    joined_ranks: tuple[int, ...] = ()
    joined_replicas: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()  # where they run
    warm_up_ms: float = 0.0  # from the start of their processes until they asked, the longest
    transfer_ms: float = 0.0
    transfer_bytes: int = 0  # to each of their ranks; of this shard
    stall_ms: float = 0.0  # that the others have not computed for, repair and transfer included

    @property
    def kind(self) -> str:
        return "joined" if self.joined_ranks else "lost"


def incident_of(
    step: int,
    grid: Grid,
    census: Census,
    lost: tuple[int, ...],
    evicted: Mapping[int, str],
    noticed_at: float,
    noticed_in: str = "advance",
    detect_ms: float = 0.0,
    complete: bool = True,
) -> Incident:
    """What a repair has found, before anything is known of what follows from it."""
    return Incident(
        step=step,
        epoch=census.epoch,
        dead_ranks=lost,
        dead_replicas=grid.replicas_of(lost),
        complete=complete,
        boundary=False,
        restore=RestoreMode.SKIP,
        extra_microbatches=0,
        discarded_microbatches=0,
        noticed_at=noticed_at,
        noticed_in=noticed_in,
        detect_ms=detect_ms,
        repair_ms=census.seconds * 1e3,
        evicted=tuple(sorted(evicted)),
        reasons=dict(evicted),
    )
