"""The content of a line of `steps.jsonl`, of a line of `incidents.jsonl`, and of `summary.json`."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from recover.faults import Fault
from recover.job.record_files import FILES
from recover.policy import Layout, RestoreMode
from recover.runs.records.goodput import account
from recover.runs.records.job_log import job_lines, launches
from recover.runs.records.kinds import IncidentRecord, Line, StepRecord
from recover.world.world import World


class StepOutcome(Protocol):
    """The outcome of a step."""

    @property
    def skipped(self) -> bool: ...

    @property
    def parameters_before(self) -> str: ...

    @property
    def contents(self) -> str: ...

    @property
    def joining(self) -> dict[int, int]: ...


class CommittedStep(Protocol):
    """The attributes of a committed step that are recorded."""

    loss: float
    grad_norm: float
    weight: float
    all_samples: list[int]
    stragglers: dict[int, float]
    reruns: int
    verified: int
    unverified: int
    corrupt: int
    wrong_sums: int
    busy: dict[int, float]

    @property
    def result(self) -> StepOutcome: ...

    @property
    def index(self) -> int: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def policy(self) -> str: ...


class RecordedIncident(Protocol):
    """The attributes of an incident that are recorded."""

    step: int
    epoch: int
    dead_ranks: tuple[int, ...]
    dead_replicas: tuple[int, ...]
    boundary: bool
    restore: RestoreMode
    extra_microbatches: int
    noticed_at: float
    noticed_in: str
    detect_ms: float
    repair_ms: float
    restore_ms: float
    redo_ms: float
    reasons: dict[int, str]
    wrong_sums: tuple[str, ...]
    left_ranks: tuple[int, ...]
    left_replicas: tuple[int, ...]
    joined_ranks: tuple[int, ...]
    joined_replicas: tuple[int, ...]
    hosts: tuple[str, ...]
    warm_up_ms: float
    transfer_ms: float
    transfer_bytes: int
    joining_steps: int
    stall_ms: float

    @property
    def kind(self) -> str: ...


def step_line(
    step: CommittedStep, world: World, lr: float, seconds: float, tokens_each: int | None = None
) -> StepRecord:
    """The line of the step that was just committed: the same on all survivors, except for times.

    `tokens_each`: tokens in a microbatch. Users' scripts are recorded with the sum of their weights instead.
    """
    microbatches = len(step.all_samples)
    stragglers = {str(replica): factor for replica, factor in step.stragglers.items()}
    counted: Any = {"weight": step.weight} if tokens_each is None else {"tokens": microbatches * tokens_each}
    record: StepRecord = {
        "step": step.index,
        "loss": _finite(step.loss),
        "grad_norm": _finite(step.grad_norm),
        "lr": lr,
        "microbatches": microbatches,
        **counted,
        "replicas": len(world.replicas),
        "epoch": world.epoch,
        "accum": step.layout.accum,
        "roles": {str(role): count for role, count in sorted(step.layout.roles().items())},
        "seconds": round(seconds, 6),
        "data_digest": data_digest(step.all_samples),
        "at": round(time.time(), 3),
        "compute_ms": round(1e3 * sum(step.busy.values()), 3),
        "wait_ms": round(
            1e3 * (max(step.busy.values(), default=0.0) * len(step.busy) - sum(step.busy.values())), 3
        ),
    }
    if step.result.parameters_before:
        record["parameters_before"] = step.result.parameters_before
    if step.result.contents:
        record["contents"] = step.result.contents
    if step.policy == "paced":
        record["shares"] = {str(share.replica): len(share.run) for share in step.layout.shares}
    if stragglers:
        record["stragglers"] = stragglers
    if step.result.joining:
        record["joining"] = {str(replica): percent for replica, percent in step.result.joining.items()}
    if step.reruns:
        record["reruns"] = step.reruns
    if step.verified or step.unverified or step.corrupt:
        record |= {"verified": step.verified, "unverified": step.unverified}
    if step.corrupt:
        record["corrupt"] = step.corrupt
    if step.wrong_sums:
        record["wrong_sums"] = step.wrong_sums
    if step.result.skipped:
        record["skipped"] = True
    return record


def note_gpu_memory(line: StepRecord, device: torch.device) -> None:
    """Add the peak memory of this rank's tensors, on a GPU. The allocator counts it on the host: the device is not
    synchronised."""
    if device.type == "cuda":
        line["gpu_peak_mib"] = round(torch.cuda.max_memory_allocated(device) / 2**20)


def incident_line(incident: RecordedIncident, kills: Iterable[Fault], exact: bool) -> IncidentRecord:
    record: IncidentRecord = {
        "step": incident.step,
        # For a death that no schedule caused: where the survivors were when they noticed it.
        "location": _scheduled_locations(kills, incident.dead_replicas, incident.step) or incident.noticed_in,
        "dead_ranks": list(incident.dead_ranks),
        "dead_replicas": list(incident.dead_replicas),
        "boundary": incident.boundary,
        "restore": str(incident.restore),
        "extra_microbatches": incident.extra_microbatches,
        # Without exact samples the survivors draw other ones.
        "redone_microbatches": incident.extra_microbatches if exact else 0,
        "epoch": incident.epoch,
        "detect_ms": round(incident.detect_ms, 3),
        "repair_ms": round(incident.repair_ms, 3),
        "restore_ms": round(incident.restore_ms, 3),
        "redo_ms": round(incident.redo_ms, 3),
        "at": round(incident.noticed_at, 3),
    }
    if incident.reasons:
        record["evicted"] = {str(replica): why for replica, why in sorted(incident.reasons.items())}
    if incident.wrong_sums:
        record["wrong_sums"] = list(incident.wrong_sums)
    if incident.left_ranks:
        record |= {
            "kind": incident.kind,
            "left_ranks": list(incident.left_ranks),
            "left_replicas": list(incident.left_replicas),
        }
    if incident.joined_ranks:
        record |= {
            "kind": incident.kind,
            "joined_ranks": list(incident.joined_ranks),
            "joined_replicas": list(incident.joined_replicas),
            "hosts": list(incident.hosts),
            "warm_up_ms": round(incident.warm_up_ms, 3),
            "transfer_ms": round(incident.transfer_ms, 3),
            "transfer_bytes": incident.transfer_bytes,
            "joining_steps": incident.joining_steps,
            "stall_ms": round(incident.stall_ms, 3),
        }
    return record


def loss_line(
    world: World, step: int, ranks: Sequence[int], seconds: float, kills: Iterable[Fault]
) -> IncidentRecord:
    """The line of ranks that were lost outside of any step; `seconds`: how long the repair took."""
    replicas = world.grid.replicas_of(ranks)
    evicted = {str(replica): world.evicted[replica] for replica in replicas if replica in world.evicted}
    record: IncidentRecord = {
        "step": step,
        "location": _scheduled_locations(kills, replicas, step) or "advance",
        "dead_ranks": list(ranks),
        "dead_replicas": list(replicas),
        "boundary": False,
        "restore": str(RestoreMode.SKIP),
        "extra_microbatches": 0,
        "redone_microbatches": 0,
        "epoch": world.epoch,
        "detect_ms": 0.0,
        "repair_ms": round(seconds * 1e3, 3),
        "restore_ms": 0.0,
        "redo_ms": 0.0,
        "at": round(time.time() - seconds, 3),
    }
    return record | {"evicted": evicted} if evicted else record


def _scheduled_locations(kills: Iterable[Fault], replicas: Collection[int], step: int) -> str:
    """The locations at which the schedule killed these replicas; "" if it did not."""
    latest: dict[int, Fault] = {}
    for kill in sorted(kills, key=lambda kill: kill.step):
        if kill.lethal and kill.replica in replicas and kill.step <= step:
            latest[kill.replica] = kill
    return ", ".join(sorted({kill.location for kill in latest.values()}))


def summary(
    run_dir: Path,
    world: World,
    digest: str | None,
    resumed_at: int,
    steps: Sequence[Line],
    incidents: Sequence[Line],
) -> dict[str, Any]:
    """Facts about all steps of the run, including those before it was resumed. Unknown ones are left out."""
    microbatches = [line["microbatches"] for line in steps] or [0]
    last = steps[-1] if steps else {"step": 0, "loss": None}
    return {
        "steps": last["step"],
        "microbatches_min": min(microbatches),
        "microbatches_max": max(microbatches),
        "replicas_start": world.grid.replicas,
        "replicas_end": len(world.replicas),
        "failures": _failures(world, resumed_at, incidents),
        **_throughput(steps, world.grid.replica_size),
        "final_loss": last["loss"],
        **({"parameters_digest": digest} if digest is not None else {}),
        "goodput": account(steps, incidents, launches(job_lines(run_dir)), until=time.time()),
        **({"joined": joined} if (joined := _count("joined_replicas", incidents)) else {}),
        **({"left": left} if (left := _count("left_replicas", incidents)) else {}),
        **({"skipped": skipped} if (skipped := sum(bool(line.get("skipped")) for line in steps)) else {}),
        **_verified(steps),
        **_gpu(steps),
    }


def _verified(steps: Sequence[Line]) -> dict[str, int]:
    """Numbers of verified gradients; nothing if the run verifies none."""
    names = ("verified", "unverified", "corrupt", "wrong_sums")
    if not any(name in line for line in steps for name in names):
        return {}
    return {name: sum(line.get(name, 0) for line in steps) for name in names}


def _failures(world: World, resumed_at: int, incidents: Sequence[Line]) -> int:
    """Replicas lost in the whole run. In this job, all that began or joined and are not there at the end count, also
    those whose loss no incident records."""
    earlier = [line for line in incidents if line["step"] <= resumed_at]
    joined, left = (
        _count(what, incidents) - _count(what, earlier) for what in ("joined_replicas", "left_replicas")
    )
    lost_earlier = _count("dead_replicas", earlier)
    return lost_earlier + world.grid.replicas + joined - left - len(world.replicas)


def _count(what: str, incidents: Iterable[Line]) -> int:
    return sum(len(line.get(what, ())) for line in incidents)


def _throughput(steps: Sequence[Line], replica_size: int) -> dict[str, float]:
    """Tokens and seconds of these steps. Steps of a user's script have no tokens but weights, which may be anything:
    for them, seconds alone."""
    tokens, seconds = sum(line.get("tokens", 0) for line in steps), sum(line["seconds"] for line in steps)
    if steps and not tokens:
        return {"seconds": round(seconds, 3)}
    rank_seconds = sum(line["seconds"] * line["replicas"] * replica_size for line in steps)
    return {
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1) if seconds else 0.0,
        # Per living rank.
        "effective_throughput": round(tokens / rank_seconds, 1) if rank_seconds else 0.0,
    }


def _gpu(steps: Sequence[Line]) -> dict[str, float]:
    facts: dict[str, float] = {}
    if peaks := [line["gpu_peak_mib"] for line in steps if "gpu_peak_mib" in line]:
        facts["gpu_peak_mib"] = max(peaks)
    if used := [(line["mfu"], line["seconds"]) for line in steps if "mfu" in line]:
        facts["mfu"] = round(sum(part * s for part, s in used) / sum(s for _, s in used), 4)
    return facts


def write_json(path: Path, content: Any) -> bool:
    """Write the file atomically, and wait for the disk for a limited time. Returns whether it was written."""
    text = (json.dumps(content, indent=2) + "\n").encode()
    return FILES.retry(lambda: FILES.disk.replace(path, text), path.name)


def data_digest(samples: Sequence[int]) -> str:
    """Digest of the sample numbers of a step, sorted."""
    return hashlib.sha256(" ".join(map(str, sorted(samples))).encode()).hexdigest()


def spans(numbers: Sequence[int]) -> str:
    """Numbers in words: `0-3, 8`, or `none`."""
    ends: list[list[int]] = []
    for number in numbers:
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ends) or "none"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
