"""The records of a run, as they lie in its files: one JSON object a line.

`steps.jsonl`      a `StepRecord` for every committed step
`incidents.jsonl`  an `IncidentRecord` for every repair
`job*.jsonl`       a `JobRecord` for what a launcher (or the agent of a host) saw: starts, ends of ranks, its own end
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
    at: float  # when it was committed, in seconds since 1970
    compute_ms: float  # that replicas have computed what they were dealt, over all of them
    wait_ms: float  # that replicas waited meanwhile for the slowest of them, over all of them
    checkpoint_ms: NotRequired[float]  # of the time since the step before: went into a checkpoint
    evaluation_ms: NotRequired[float]  # and into an evaluation
    heldout_loss: NotRequired[float]
    gpu_peak_mib: NotRequired[int]  # memory of the writer's tensors on its GPU, the most so far
    mfu: NotRequired[float]  # model FLOPs utilisation: recover/train/models/flops.py says what is counted
    stragglers: NotRequired[dict[str, float]]
    reruns: NotRequired[int]  # of the step, because a value was too large for its exponents
    skipped: NotRequired[bool]  # True: the gradient was not finite, or all weights were 0


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
    at: float  # when its writer first knew, in seconds since 1970
    evicted: NotRequired[dict[str, str]]  # the replicas that the others went on without, and why
    # Where replicas have joined; somebody may have been lost in the same repair.
    kind: NotRequired[str]  # "joined"; a record without it tells of losses alone
    joined_ranks: NotRequired[list[int]]
    joined_replicas: NotRequired[list[int]]
    hosts: NotRequired[list[str]]  # on which they run
    warm_up_ms: NotRequired[float]  # from the start of their processes until they asked, the longest
    transfer_ms: NotRequired[float]  # of the state, to them
    transfer_bytes: NotRequired[int]  # to each of their ranks, of the writer's shard
    stall_ms: NotRequired[float]  # that the others have not computed for


class JobRecord(TypedDict):
    """What only who stands beside the ranks can see.

    `what` is `start` (of the whole job, by its launcher alone), `exit` (of a rank), `heard` (of ranks that were lost on
    another host), `ending` (from here on the launcher ends what is left), or `end`.
    """

    what: str
    at: float
    # start: how the job was begun
    ranks: NotRequired[int]
    replica_size: NotRequired[int]
    session: NotRequired[str]  # its board lies there while it runs, on this host
    host: NotRequired[str]
    run: NotRequired[str]  # of several hosts: what their starts and ends have in common
    faults: NotRequired[list[str]]
    # exit: a rank is gone, and what is known of it
    rank: NotRequired[int]
    pid: NotRequired[int]
    signal: NotRequired[str]  # that ended it, where the kernel tells
    code: NotRequired[int]  # that it ended with
    step: NotRequired[int]  # what it was doing, as its board has it
    doing: NotRequired[str]
    slots: NotRequired[list[int]]
    words: NotRequired[dict[str, Any]]  # its last ones
    note: NotRequired[dict[str, Any]]  # on the slots that it was computing, if it died over them
    crash: NotRequired[str]  # its stack, if native code crashed
    kernel: NotRequired[
        list[str]
    ]  # what the kernel said of this process, or of the host's hardware just then
    oom_kills: NotRequired[int]  # of the control group, since the start
    disk_full: NotRequired[str]
    gpu: NotRequired[list[str]]
    # heard: of another `host`, by its agent, or because there was no sign of it for so long
    lost_ranks: NotRequired[list[int]]
    why: NotRequired[str]
    lease: NotRequired[float]  # seconds; only if the host itself is lost
    # ending
    reason: NotRequired[str]


Line = dict[str, Any]  # a record whose kind does not matter
Event = dict[
    str, Any
]  # at (seconds), what, rank, life (0, and one more after every restart), and what belongs to it
