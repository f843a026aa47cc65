"""Clusters from publications. Each value is marked as published or as assumed."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

RSC = (
    "Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, HPCA 2025, "
    "arXiv:2410.21680"
)
LLAMA3 = "Llama Team, The Llama 3 Herd of Models, 2024, arXiv:2407.21783"
FT_HSDP = "Salpekar et al., Training LLMs with Fault Tolerant HSDP on 100,000 GPUs, 2026, arXiv:2602.00277"
SPARE = (
    "Lee et al., SPARe: Stacked Parallelism with Adaptive Reordering for Fault-Tolerant LLM Pretraining Systems with "
    "100k+ GPUs, ICML 2026, arXiv:2603.00357"
)


@dataclass(frozen=True)
class Preset:
    about: str
    source: str
    values: dict[str, Any]
    published: tuple[str, ...]  # keys with values of the source; all others are assumed
    assumed: str


# ReCoVer was never run at these sizes. We assume seconds: between a tenth of a second, measured on few ranks, and three
# minutes, which the only published system of this kind takes.
_RECOVERY = {
    "recovery.detect_s": 2.0,
    "recovery.lease_s": 10.0,
    "recovery.repair_s": 5.0,
    "recovery.repair_ms_per_replica": 10.0,
    "failures.silent": 0.3,
}

PRESETS = {
    "rsc-16k": Preset(
        "a research cluster: 16,384 A100s, 6.5 failures per 1,000 node-days",
        RSC,
        {
            "cluster.nodes": 2048,
            "cluster.spares": 32,
            "failures.per_node_day": 6.5e-3,
            "failures.repair_hours": 24.0,
            "job.replica_gpus": 64,
            "job.accum": 16,
            "job.tokens": 8192,
            "job.parameters": 70e9,
            "job.gpu": "NVIDIA A100-SXM4-80GB",
            "job.mfu": 0.45,
            "job.budget": 15e12,
            "reduction.gigabytes": 4.4,
            "reduction.gigabytes_per_s": 20.0,
            "reduction.hidden": 0.8,
            "joining.state_gigabytes": 13.0,
            "joining.gigabytes_per_s": 20.0,
            "checkpoint.save_s": 10.0,
            **_RECOVERY,
        },
        ("cluster.nodes", "failures.per_node_day"),
        "the job (70B parameters on replicas of 64), restarts of 9 minutes, 24 hours of repair, 32 spare nodes",
    ),
    "llama3-16k": Preset(
        "Llama 3 405B: 16,384 H100s, 419 unexpected interruptions in 54 days",
        LLAMA3,
        {
            "cluster.nodes": 2048,
            "cluster.spares": 64,
            "failures.per_node_day": 419 / 54 / 2048,
            "failures.repair_hours": 24.0,
            "job.replica_gpus": 128,
            "job.accum": 16,
            "job.tokens": 8192,
            "job.parameters": 405e9,
            "job.mfu": 0.41,
            "job.budget": 15.6e12,
            "reduction.gigabytes": 12.7,
            "reduction.gigabytes_per_s": 40.0,
            "reduction.hidden": 0.8,
            "joining.state_gigabytes": 38.0,
            "joining.gigabytes_per_s": 40.0,
            "checkpoint.save_s": 5.0,
            "restart.start_s": 240.0,
            "run.days": 54.0,
            **_RECOVERY,
        },
        (
            "cluster.nodes",
            "failures.per_node_day",
            "job.replica_gpus",
            "job.accum",
            "job.tokens",
            "job.parameters",
            "job.mfu",
            "job.budget",
            "run.days",
        ),
        "restarts of 8 minutes, checkpoints that stop training for 5 s, 64 spare nodes, 24 hours of repair",
    ),
    "meta-100k": Preset(
        "100,000 GPUs: a failure every 18 minutes, a restart of all of 10 minutes",
        FT_HSDP,
        {
            "cluster.nodes": 12544,
            "cluster.spares": 256,
            "failures.per_node_day": 1440 / 18 / 12544,
            "failures.repair_hours": 24.0,
            "job.replica_gpus": 1024,
            "job.accum": 32,
            "job.tokens": 65536,
            "job.parameters": 288e9,
            "job.mfu": 0.35,
            "job.budget": 30e12,
            "reduction.gigabytes": 8.0,
            "reduction.gigabytes_per_s": 40.0,
            "reduction.hidden": 0.8,
            "joining.start_s": 600.0,
            "joining.state_gigabytes": 24.0,
            "joining.gigabytes_per_s": 40.0,
            "checkpoint.save_s": 2.0,
            "restart.detect_s": 60.0,
            "restart.schedule_s": 120.0,
            "restart.start_s": 330.0,
            "restart.load_s": 60.0,
            "discarding.timeout_s": 120.0,
            "discarding.quorum_s": 60.0,
            "discarding.start_s": 600.0,
            **_RECOVERY,
        },
        ("failures.per_node_day", "discarding.timeout_s", "discarding.quorum_s"),
        "98 replicas of 1,024 GPUs, the model, how the published 10 minutes of a restart and 3 minutes of a step "
        "without the lost replica are made up, 10 minutes until a replica is back, 256 spare nodes",
    ),
    "spare-600k": Preset(
        "600,000 GPUs: a failure every 5 minutes, a restart of all of an hour",
        SPARE,
        {
            "cluster.nodes": 75000,
            "failures.per_node_day": 288 / 75000,
            "failures.process": "weibull",
            "failures.shape": 0.78,
            "failures.transient": 1.0,
            "job.replica_gpus": 1000,
            "job.accum": 16,
            "job.tokens": 8192,
            "job.parameters": 10e12,
            "job.gpu_gigabytes": 288.0,
            "job.mfu": 0.4,
            "job.budget": 100e12,
            "reduction.gigabytes": 40.0,
            "reduction.gigabytes_per_s": 40.0,
            "reduction.hidden": 0.8,
            "joining.start_s": 1800.0,
            "discarding.start_s": 1800.0,
            "joining.state_gigabytes": 60.0,
            "joining.gigabytes_per_s": 40.0,
            "checkpoint.save_s": 60.0,
            "restart.detect_s": 60.0,
            "restart.schedule_s": 600.0,
            "restart.start_s": 2640.0,
            "restart.load_s": 300.0,
            "restart.struck": "goes-on",
            "replication.copies": 3,
            "replication.stack": 8,
            **_RECOVERY,
        },
        (
            "cluster.nodes",
            "failures.per_node_day",
            "failures.process",
            "failures.shape",
            "job.parameters",
            "job.replica_gpus",
            "checkpoint.save_s",
            "replication.copies",
            "replication.stack",
        ),
        "what the hour of a restart is made of; that failures do not strike a restart, and that broken nodes are "
        "replaced at once (both follow from the published availability); length of a step; half an hour until a "
        "replica is back; GPUs of 288 GB, as the published model does not fit in less. The figures were read in a "
        "published summary of the paper",
    ),
}


def preset(name: str) -> Preset:
    try:
        return PRESETS[name]
    except KeyError:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no preset {name!r}; {hint}there are {', '.join(PRESETS)}") from None
