"""Parameters of a scenario from measurements: runs of `recover train`, files of `recover bench`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import yaml

from recover.runs.records.json_lines import read
from recover.runs.records.kinds import Line


def learn(paths: Sequence[Path]) -> dict[str, Any]:
    """Dotted keys of a scenario, from run directories together, and from JSON files, which take precedence."""
    found: dict[str, Any] = {}
    runs = [path for path in paths if path.is_dir()]
    if runs:
        found |= _from_runs(runs)
    for path in paths:
        if not path.is_dir():
            found |= _from_bench(path)
    return found


def undisturbed(steps: Sequence[Line], incidents: Sequence[Line]) -> list[Line]:
    """Steps without incidents, except the first, which warms up, and those right after a loss."""
    struck = {incident["step"] + late for incident in incidents for late in (0, 1)}
    return [line for line in steps[1:] if line["step"] not in struck and line.get("seconds")]


def _from_runs(runs: Sequence[Path]) -> dict[str, Any]:
    calm: list[Line] = []
    incidents: list[Line] = []
    config: Line = {}
    for run in runs:
        if not (run / "steps.jsonl").exists() or not (run / "config.yaml").exists():
            raise ValueError(
                f"{run} is not a run of `recover train`: it has no steps.jsonl or no config.yaml"
            )
        theirs = read(run / "incidents.jsonl").whole
        calm += undisturbed(read(run / "steps.jsonl").whole, theirs)
        incidents += theirs
        config = yaml.safe_load((run / "config.yaml").read_text()) or {}
    if len(calm) < 3:
        raise ValueError(
            f"{', '.join(map(str, runs))}: {len(calm)} undisturbed steps are too few; give runs with 3 at least"
        )
    microbatch, overhead = fit_steps([(line["accum"], line["seconds"]) for line in calm])
    size = config.get("shard") or config.get("tp", 1) * config.get("pp", 1) * config.get("ep", 1)
    found = {
        "cluster.nodes": config["replicas"],
        "cluster.gpus_per_node": size,
        "job.replica_gpus": size,
        "job.accum": config["accum"],
        "job.tokens": config["microbatch_size"] * config["seq_len"],
        "job.policy": config["policy"]
        if config.get("policy") in ("balanced", "paced", "static")
        else "balanced",
        "job.microbatch_s": microbatch,
        "job.overhead_s": overhead,
        "recovery.detect_s": 0.0,
        "recovery.vote_s": 0.0,  # part of the measured steps
    }
    losses = [incident for incident in incidents if incident.get("kind") != "joined"]
    if losses:
        found["recovery.repair_s"] = median(incident["repair_ms"] for incident in losses) / 1e3
        found["recovery.restore_s"] = median(incident["restore_ms"] for incident in losses) / 1e3
    joins = [incident for incident in incidents if "stall_ms" in incident]
    if joins:  # the stall of the others includes the transfer
        found["joining.start_s"] = median(incident["warm_up_ms"] for incident in joins) / 1e3
        found["joining.stall_s"] = median(incident["stall_ms"] for incident in joins) / 1e3
        found["joining.state_gigabytes"] = 0.0
    return found


def fit_steps(steps: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of a microbatch, and of a step without its microbatches: a line through the medians by accumulation."""
    seconds: dict[int, list[float]] = {}
    for accum, took in steps:
        seconds.setdefault(accum, []).append(took)
    points = sorted((accum, median(values), len(values)) for accum, values in seconds.items())
    if len(points) == 1:
        return points[0][1] / points[0][0], 0.0
    accums, medians, numbers = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    slope, start = np.polyfit(accums, medians, 1, w=np.sqrt(numbers))
    if start < 0:
        return float(np.sum(numbers * accums * medians) / np.sum(numbers * accums**2)), 0.0
    return float(slope), float(start)


def fit_alpha_beta(points: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """Milliseconds of a message and GB/s, from (ranks, megabytes, milliseconds) of reductions."""
    rows = np.array(
        [[2.0 * (ranks - 1).bit_length(), 2 * (ranks - 1) / ranks * size] for ranks, size, _ in points]
    )
    times = np.array([took for *_, took in points])
    weights = 1 / times  # relative errors: small reductions count as much as large ones
    alpha, beta = np.linalg.lstsq(rows * weights[:, None], times * weights, rcond=None)[0]
    return max(float(alpha), 0.0), 1 / float(beta)  # MB per ms are GB per s


def _from_bench(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"--from {path} cannot be read ({error.strerror}); give a run directory or a file"
        ) from None
    except ValueError:
        raise ValueError(f"--from {path} is neither JSON of `recover bench` nor a run directory") from None
    found: dict[str, Any] = {}
    if "breakdown" in content:
        pieces = [row["baseline"]["pieces"] for row in content["breakdown"]["rows"]]
        found["checkpoint.save_s"] = max(fmean(piece["save"] for piece in pieces), 1e-3)
        found["restart.detect_s"] = fmean(piece["handling"] for piece in pieces)
        found["restart.schedule_s"] = 0.0
        found["restart.start_s"] = fmean(piece["restart"] for piece in pieces)
        found["restart.load_s"] = fmean(piece["load"] for piece in pieces)
        ours = [row["ours"]["pieces"] for row in content["breakdown"]["rows"]]
        found["recovery.detect_s"] = fmean(piece["detect"] for piece in ours)
        found["recovery.repair_s"] = fmean(piece["repair"] for piece in ours)
        found["recovery.restore_s"] = fmean(piece["restore"] for piece in ours)
    if "repair_ms" in content:
        found["recovery.repair_s"] = content["repair_ms"]["mpi"]["median"] / 1e3
    if "collectives_ms" in content:
        points = [
            (int(ranks), float(size), ways["mpi carrier"]["median"])
            for ranks, sizes in content["collectives_ms"].items()
            for size, ways in sizes.items()
        ]
        found["reduction.alpha_ms"], found["reduction.gigabytes_per_s"] = fit_alpha_beta(points)
    if not found:
        raise ValueError(
            f"--from {path}: it has no parameters of a scenario; give a file of bench breakdown, repair or "
            "collectives"
        )
    return found
