"""The records of a run, as they lie in its files: one JSON object a line.

`steps.jsonl`      a `StepRecord` for every committed step
`incidents.jsonl`  an `IncidentRecord` for every repair
`events-R.jsonl`   an `Event` for whatever rank R of a benchmark noted
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class StepRecord(TypedDict):
    """A committed step: the same on all survivors, but for the time it took."""

    step: int
    loss: float | None  # None: not finite
    grad_norm: float | None
    lr: float
    microbatches: int
    replicas: int
    epoch: int
    accum: int
    roles: dict[str, int]
    seconds: float
    data_digest: str  # over the numbers of its samples
    tokens: NotRequired[
        int
    ]  # a loop of one's own has `weight` instead: the sum of what it gave to step.backward
    weight: NotRequired[float]
    own_step: NotRequired[int]  # of a script with several Steps: the number in the Step that took it,
    part: NotRequired[int]  # and which one that was, from 1 on; `step` counts them all
    heldout_loss: NotRequired[float]
    gpu_peak_mib: NotRequired[int]  # memory of the writer's tensors on its GPU, the most so far
    mfu: NotRequired[float]  # model FLOPs utilisation: recover/models/flops.py says what is counted
    stragglers: NotRequired[dict[str, float]]


class IncidentRecord(TypedDict):
    """A repair, and what it cost the step that it struck. Times are those of the rank that wrote it."""

    step: int
    location: str
    dead_ranks: list[int]
    dead_replicas: list[int]
    boundary: bool
    restore: str
    extra_microbatches: int
    redone_microbatches: int
    epoch: int
    detect_ms: float
    repair_ms: float
    restore_ms: float
    redo_ms: float


Line = dict[str, Any]  # a record whose kind does not matter
Event = dict[
    str, Any
]  # at (seconds), what, rank, life (0, and one more after every restart), and what belongs to it
