"""Whether a model fits in the memory of a replica's GPUs: weights, gradients and optimizer, without activations."""

from __future__ import annotations

import math
import re

from recover_lab.simulate.scenario_keys import TrainingJob

# Gigabytes by data sheet, where the name of the card does not say them. The first name that fits counts.
_GIGABYTES = {
    r"\bGB200\b": 186.0,
    r"\bB200\b": 180.0,
    r"\bGH200\b": 96.0,
    r"\bH200\b": 141.0,
    r"\bH100 NVL\b": 94.0,
    r"\bH100\b": 80.0,
    r"\bH20\b": 96.0,
    r"\bA100\b": 80.0,
    r"\bL40S?\b": 48.0,
    r"\bL4\b": 24.0,
}


def gpu_gigabytes(job: TrainingJob) -> float | None:
    """Memory of one GPU; None for a card that is not known here."""
    if job.gpu_gigabytes is not None:
        return job.gpu_gigabytes
    if named := re.search(r"\b(\d+) ?GB\b", job.gpu):
        return float(named[1])
    return next((size for name, size in _GIGABYTES.items() if re.search(name, job.gpu)), None)


def state_gigabytes(job: TrainingJob) -> float:
    return job.parameters * job.bytes_per_parameter / 1e9


def smallest_replica(job: TrainingJob, nodes: int, gpus_per_node: int) -> int | None:
    """The fewest GPUs that hold the model, so that whole replicas fill the nodes; None if two replicas do not fit."""
    there = gpu_gigabytes(job)
    if there is None:
        return None
    inside = [size for size in range(1, gpus_per_node + 1) if gpus_per_node % size == 0]
    whole = [n * gpus_per_node for n in range(2, nodes // 2 + 1) if nodes % n == 0]
    fitting = (
        size
        for size in (*inside, *whole)
        if size * there >= state_gigabytes(job) and 2 * size <= nodes * gpus_per_node
    )
    return next(fitting, None)


def refusal(job: TrainingJob, nodes: int, gpus_per_node: int) -> str:
    """Why the model does not fit in a replica, with the remedy; "" if it fits, or if that cannot be known."""
    there, gpus = gpu_gigabytes(job), nodes * gpus_per_node
    if job.microbatch_s is not None or there is None:
        return ""  # with a given time of a microbatch, nothing depends on the model
    used, needed = min(job.replica_gpus, gpus), state_gigabytes(job)
    if used * there >= needed:
        return ""
    size = smallest_replica(job, nodes, gpus_per_node)
    most = used if size else max(1, gpus // 2)  # GPUs of a replica, of two at least
    remedy = (
        f"use job.replica_gpus={size}" if size else f"use at least {2 * math.ceil(needed / there):,} GPUs"
    )
    holder = f"{used:,} GPUs of a replica" if job.replica_gpus <= gpus else f"{gpus:,} GPUs of the job"
    return (
        f"a model of job.parameters={job.parameters:.4g} needs {needed:,.0f} GB of GPU memory for weights, gradients "
        f"and optimizer (job.bytes_per_parameter={job.bytes_per_parameter:g}; activations are not counted), and the "
        f"{holder} ({job.gpu}) have {used * there:,.0f} GB; {remedy}, or a model of at most "
        f"job.parameters={_rounded_down(most * there * 1e9 / job.bytes_per_parameter):g}"
    )


def _rounded_down(value: float) -> float:
    """The value rounded down to two digits."""
    digits = 10.0 ** (len(f"{value:.0f}") - 2)
    return value // digits * digits
