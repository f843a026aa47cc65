"""What one repair meant for the step it struck."""

from __future__ import annotations

from dataclasses import dataclass

from recover.policy import RestoreMode


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
    evicted: tuple[int, ...] = ()  # the dead replicas that held other parameters than the majority
