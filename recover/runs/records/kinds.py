"""The records of a run, as they lie in its files: one JSON object a line.

`steps.jsonl`      a `StepRecord` for every committed step
`incidents.jsonl`  an `IncidentRecord` for every repair
`job*.jsonl`       a `JobRecord` for what a launcher (or the agent of a host) saw: starts, ends of ranks, its own end
`events-R.jsonl`   an `Event` for whatever rank R of a benchmark noted
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class StepRecord(TypedDict):
    """A committed step: the same on all survivors, except for times."""

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
    data_digest: str  # digest of the numbers of its samples
    tokens: NotRequired[int]
    weight: NotRequired[
        float
    ]  # of users' scripts, instead of tokens: sum of the weights given to step.backward
    own_step: NotRequired[int]  # in a script with several Steps: number of the step in its Step,
    part: NotRequired[int]  # and number of that Step, from 1 on; `step` counts the steps of all
    at: float  # time of the commit, in seconds since 1970
    compute_ms: float  # time that replicas computed their shares, summed over replicas
    wait_ms: float  # time that replicas waited for the slowest of them, summed over replicas
    checkpoint_ms: NotRequired[float]  # time spent on a checkpoint since the step before
    evaluation_ms: NotRequired[float]  # time spent on an evaluation since the step before
    heldout_loss: NotRequired[float]
    gpu_peak_mib: NotRequired[int]  # peak memory of the writer's tensors on its GPU, so far
    mfu: NotRequired[float]  # model FLOPs utilisation, as defined in recover/train/models/flops.py
    stragglers: NotRequired[dict[str, float]]
    reruns: NotRequired[int]  # repetitions of the step because a value was too large for its exponents
    skipped: NotRequired[bool]  # True: the gradient was not finite, or all weights were 0


class IncidentRecord(TypedDict):
    """A repair, and its cost for the step. Times are those of the rank that wrote the record."""

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
    at: float  # when the writer noticed the loss, in seconds since 1970
    evicted: NotRequired[dict[str, str]]  # evicted replicas, and why
    # If replicas joined; ranks may have been lost in the same repair.
    kind: NotRequired[str]  # "joined"; missing in records of losses only
    joined_ranks: NotRequired[list[int]]
    joined_replicas: NotRequired[list[int]]
    hosts: NotRequired[list[str]]  # of the joined ranks
    warm_up_ms: NotRequired[float]  # from the start of a process to its request to join, the longest
    transfer_ms: NotRequired[float]  # of the state
    transfer_bytes: NotRequired[int]  # to each joined rank, of the writer's shard
    stall_ms: NotRequired[float]  # time for which the other replicas did not compute


class JobRecord(TypedDict):
    """What only the launcher, or the agent of a host, can see.

    `what` is `start` (of the whole job), `exit` (of a rank), `heard` (of ranks that were lost on another host),
    `ending` (the launcher ends the remaining ranks from here on), or `end`.
    """

    what: str
    at: float
    # start: the options of the job
    ranks: NotRequired[int]
    replica_size: NotRequired[int]
    session: NotRequired[str]  # directory of its board on this host, while it runs
    host: NotRequired[str]
    run: NotRequired[str]  # of a job on several hosts: identifies its starts and ends
    faults: NotRequired[list[str]]
    # exit: the facts about a rank that has exited
    rank: NotRequired[int]
    pid: NotRequired[int]
    signal: NotRequired[str]  # that ended it, if the kernel tells
    code: NotRequired[int]  # its exit code
    step: NotRequired[int]  # its activity, from its board
    doing: NotRequired[str]
    slots: NotRequired[list[int]]
    words: NotRequired[dict[str, Any]]  # its last message
    note: NotRequired[dict[str, Any]]  # on the slots that it was computing when it died
    crash: NotRequired[str]  # its stack, if native code crashed
    kernel: NotRequired[
        list[str]
    ]  # lines of the kernel about this process, or about the hardware at that time
    oom_kills: NotRequired[int]  # of the control group, since the start
    disk_full: NotRequired[str]
    gpu: NotRequired[list[str]]
    # heard: ranks of another `host`, reported by its agent, or lost because its lease has expired
    lost_ranks: NotRequired[list[int]]
    why: NotRequired[str]
    lease: NotRequired[float]  # seconds; only if the host itself is lost
    # ending
    reason: NotRequired[str]


Line = dict[str, Any]  # a record of any kind
Event = dict[str, Any]  # at (seconds), what, rank, life (0, plus one per restart), and fields of its kind
