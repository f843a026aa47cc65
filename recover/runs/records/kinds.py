"""The records of a run, as they lie in its files: one JSON object a line.

`steps.jsonl`      a `StepRecord` for every committed step
`incidents.jsonl`  an `IncidentRecord` for every repair
`job*.jsonl`       a `JobRecord` for what a launcher (or the agent of a host) saw: starts, ends of ranks, its own end
`events-R.jsonl`   the `Event`s that rank R of a benchmark has noted
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

# The reason of an eviction begins with it if the device of a replica has computed a wrong result.
WRONG_GRADIENT = "its gradient of slot"
WRONG_SUM = "its sum of gradients"
WRONG_RESULTS = (WRONG_GRADIENT, WRONG_SUM)


class StepRecord(TypedDict):
    """A committed step: the same on all survivors, but for the time it took."""

    # Number of the step, from 1.
    step: int
    # Mean loss of the step; null if it is not finite.
    loss: float | None
    # Norm of the gradient before clipping; null if it is not finite.
    grad_norm: float | None
    # Learning rate of the step.
    lr: float
    # Microbatches in the sum: B.
    microbatches: int
    # Living replicas at the end of the step.
    replicas: int
    # Epoch of the world at the end of the step.
    epoch: int
    # Microbatches of a major at the beginning of the step.
    accum: int
    # Number of replicas in each role at the beginning of the step.
    roles: dict[str, int]
    # Microbatches of each replica at the beginning of the step, where the policy deals them by speed.
    shares: NotRequired[dict[str, int]]
    # Duration of the step.
    seconds: float
    # SHA-256 of the sample numbers.
    data_digest: str
    # 128-bit digest of the parameters of a replica before the step; it depends on how a replica is sharded.
    parameters_before: NotRequired[str]
    # Sum of the checksums of the microbatches: tensors in host memory, the first MiB of each.
    contents: NotRequired[str]
    # Tokens of the step (`recover train`).
    tokens: NotRequired[int]
    # Sum of the weights given to `step.backward` (scripts of your own).
    weight: NotRequired[float]
    # Scripts with several Steps: number of the step in its own Step.
    own_step: NotRequired[int]
    # Scripts with several Steps: which Step it was, from 1; `step` counts all of them.
    part: NotRequired[int]
    # When it was committed, in seconds since 1970.
    at: float
    # Time that all replicas together computed their shares.
    compute_ms: float
    # Time that all replicas together waited for the slowest one.
    wait_ms: float
    # Time of a checkpoint since the step before.
    checkpoint_ms: NotRequired[float]
    # Time of an evaluation since the step before; in scripts of your own, of `step.on_first` as well.
    evaluation_ms: NotRequired[float]
    # Scripts of your own: other time of the script since the step before, and after `step.backward` on a CPU.
    outside_ms: NotRequired[float]
    # Loss on held-out data, after an evaluation.
    heldout_loss: NotRequired[float]
    # The step after which `heldout_loss` was evaluated, if it is not this one (scripts of your own).
    heldout_step: NotRequired[int]
    # Peak memory of the writer's tensors on its GPU so far.
    gpu_peak_mib: NotRequired[int]
    # Model FLOPs utilisation; `recover/train/models/flops.py` defines it.
    mfu: NotRequired[float]
    # Replicas far slower than the median of the others, with the factor.
    stragglers: NotRequired[dict[str, float]]
    # Replicas that join in instalments (`join`), with the percentage of the state that they hold.
    joining: NotRequired[dict[str, int]]
    # How often the step was run again because a value was too large for its exponents.
    reruns: NotRequired[int]
    # Slots whose gradients two replicas computed alike (`verify`).
    verified: NotRequired[int]
    # Slots that were to be verified, and lost their pair by a death.
    unverified: NotRequired[int]
    # Replicas that were evicted in this step because a gradient of theirs, or their sum of gradients, was wrong.
    corrupt: NotRequired[int]
    # Reduced sums that were wrong on a rank in this step, and were reduced again (`verify`, reproducible sums).
    wrong_sums: NotRequired[int]
    # True: the optimizer was skipped, because the gradient was not finite or all weights were 0.
    skipped: NotRequired[bool]


class IncidentRecord(TypedDict):
    """A repair, and what it cost the step in which it happened. Times are those of the writing rank."""

    # The step in which the loss was noticed.
    step: int
    # Where the schedule struck; for other deaths, where the survivors were when they noticed.
    location: str
    # Ranks that were lost.
    dead_ranks: list[int]
    # Replicas that were lost.
    dead_replicas: list[int]
    # True: survivors had to run extra microbatches.
    boundary: bool
    # What the loss meant for gradients reduced before it: `skip`, `blocking` or `non-blocking`.
    restore: str
    # Microbatches that survivors ran in addition to their shares.
    extra_microbatches: int
    # Those of them that repeat samples of the dead: all with `samples=exact`, none with `partitioned`.
    redone_microbatches: int
    # Epoch of the world after the repair.
    epoch: int
    # From the notice of the death until the repair began; the rank finishes its share first.
    detect_ms: float
    # The repair itself.
    repair_ms: float
    # Restoring gradients.
    restore_ms: float
    # Running the missing microbatches.
    redo_ms: float
    # When the writer first knew, in seconds since 1970.
    at: float
    # Replicas that were evicted, with the reason.
    evicted: NotRequired[dict[str, str]]
    # Ranks whose reduced sums were wrong, with their hosts: all sums of the step were reduced again.
    wrong_sums: NotRequired[list[str]]
    # `joined` if replicas joined in this repair, `left` if replicas left on notice; absent for losses alone.
    kind: NotRequired[str]
    # Ranks that left on notice. They are not among `dead_ranks`.
    left_ranks: NotRequired[list[int]]
    # Replicas that left on notice.
    left_replicas: NotRequired[list[int]]
    # Ranks that joined.
    joined_ranks: NotRequired[list[int]]
    # Replicas that joined.
    joined_replicas: NotRequired[list[int]]
    # Hosts of the joined replicas.
    hosts: NotRequired[list[str]]
    # From the start of the joining processes until they asked, the longest.
    warm_up_ms: NotRequired[float]
    # Transfer of the state.
    transfer_ms: NotRequired[float]
    # Bytes sent to each joining rank, of the writer's shard.
    transfer_bytes: NotRequired[int]
    # Steps over which the state was handed over in instalments (`join`); 0: in one pause.
    joining_steps: NotRequired[int]
    # Time for which the other replicas did not compute.
    stall_ms: NotRequired[float]


class JobRecord(TypedDict):
    """An observation of the launcher, or of the agent of a host.

    `what` is `start` (of the whole job, by its launcher alone), `exit` (of a rank), `heard` (of ranks that were lost
    on another host), `ending` (afterwards the launcher ends the remaining ranks), or `end`.
    """

    # Kind of the record.
    what: str
    # Time, in seconds since 1970.
    at: float
    # start: number of ranks.
    ranks: NotRequired[int]
    # start: ranks per replica.
    replica_size: NotRequired[int]
    # start: directory of the session, with the board, while the job runs.
    session: NotRequired[str]
    # start, heard, and with `run` end: name of the host.
    host: NotRequired[str]
    # start, end: id that the records of all hosts of one run have in common.
    run: NotRequired[str]
    # start: scheduled faults.
    faults: NotRequired[list[str]]
    # exit: the rank.
    rank: NotRequired[int]
    # exit: its process id.
    pid: NotRequired[int]
    # exit: the signal that ended it, where the kernel tells. end: the signal that ended the job.
    signal: NotRequired[str]
    # exit: its exit code.
    code: NotRequired[int]
    # exit: the step it was in, from its board.
    step: NotRequired[int]
    # exit: what it was doing, from its board.
    doing: NotRequired[str]
    # exit: the slots it was computing.
    slots: NotRequired[list[int]]
    # exit: its marker, `ranks/RANK.end`.
    words: NotRequired[dict[str, Any]]
    # exit: the note on its slots, if it died over them.
    note: NotRequired[dict[str, Any]]
    # exit: its stack, if native code crashed.
    crash: NotRequired[str]
    # exit: lines of the kernel's log on this process, or on the host's hardware at that time.
    kernel: NotRequired[list[str]]
    # exit: OOM kills of the control group since the start.
    oom_kills: NotRequired[int]
    # exit: the full file system.
    disk_full: NotRequired[str]
    # exit: errors of GPUs.
    gpu: NotRequired[list[str]]
    # heard: ranks that were lost on another host.
    lost_ranks: NotRequired[list[int]]
    # heard: the cause.
    why: NotRequired[str]
    # heard: lease of the host in seconds, only if the host itself was lost.
    lease: NotRequired[float]
    # ending: why the launcher ends the job. end: why the job has failed.
    reason: NotRequired[str]
    # start: whether it is a script of the user's, by `recover run`.
    script: NotRequired[bool]
    # start: the process that writes this file: pid, when it began, its pid namespace, boot and machine.
    owner: NotRequired[dict[str, Any]]
    # end: true if the signal asked the ranks to stop after their step, and they did.
    asked: NotRequired[bool]
    # end: the host that received the signal, if it was another one.
    by: NotRequired[str]
    # end: true if this host has ended and the others go on.
    left: NotRequired[bool]


Line = dict[str, Any]  # a record whose kind does not matter
Event = dict[
    str, Any
]  # at (seconds), what, rank, life (0, and one more after every restart), and what belongs to it
