"""A run directory such as a job leaves, made up for tests that only read one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

START = 1_700_000_000.0


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def step_line(step: int, replicas: int, batch: int = 16, **more: Any) -> dict[str, Any]:
    """The record of a step. Steps take one second; the first one begins two seconds after the start."""
    return {
        "step": step,
        "loss": round(5 * math.exp(-step / 40) + 0.01 * (step % 7), 6),
        "grad_norm": 1.0,
        "lr": 1e-3,
        "microbatches": batch,
        "tokens": batch * 128,
        "replicas": replicas,
        "epoch": 1,
        "accum": -(-batch // replicas),
        "roles": {"major": replicas},
        "seconds": 1.0,
        "data_digest": str(step),
        "at": START + 2 + step,
        "compute_ms": 800.0 * replicas,
        "wait_ms": 50.0 * replicas,
        **more,
    }


def incident_line(step: int, dead: list[int], epoch: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "location": "in-reduce",
        "dead_ranks": dead,
        "dead_replicas": dead,
        "boundary": True,
        "restore": "non-blocking",
        "extra_microbatches": 4,
        "redone_microbatches": 4,
        "epoch": epoch,
        "detect_ms": 20.0,
        "repair_ms": 70.0,
        "restore_ms": 2.0,
        "redo_ms": 40.0,
        "at": START + 2 + step - 0.2,
        **more,
    }


def start_line(ranks: int, **more: Any) -> dict[str, Any]:
    line = {
        "what": "start",
        "at": START,
        "ranks": ranks,
        "replica_size": 1,
        "host": "somewhere",
        "faults": [],
    }
    return {**line, "session": "/nowhere/at/all", **more}


def exit_line(rank: int, at: float, **more: Any) -> dict[str, Any]:
    return {"what": "exit", "at": at, "rank": rank, "pid": 4242, "step": 5, "doing": "computing", **more}


def make_run(place: Path, steps: int = 20, replicas: int = 4, lost_at: int | None = 5) -> Path:
    """Replica 1 is killed in one of the steps; the run goes on and is not finished."""
    (place / "ranks").mkdir(parents=True)
    lines = [
        step_line(n, replicas - (lost_at is not None and n >= lost_at), batch=4 * replicas)
        for n in range(1, steps + 1)
    ]
    job = [start_line(replicas)]
    if lost_at is not None:
        write_lines(place / "incidents.jsonl", [incident_line(lost_at, [1])])
        job.append(exit_line(1, START + 2 + lost_at - 0.25, signal="SIGKILL", step=lost_at))
    write_lines(place / "steps.jsonl", lines)
    write_lines(place / "job.jsonl", job)
    settings = {"steps": 2 * steps, "replicas": replicas, "global_batch": 4 * replicas}
    (place / "config.yaml").write_text(yaml.safe_dump(settings))
    (place / "ranks" / "0.log").write_text("what rank 0 did\n")
    return place


def make_eventful_run(place: Path, steps: int = 60) -> Path:
    """One of 4 replicas is killed after a sixth of the steps and one joins after a third; after two thirds the run is
    resumed on 2 replicas. All that a step can record is recorded."""
    (place / "ranks").mkdir(parents=True)
    lost, joined, resumed = steps // 6, steps // 3, steps * 2 // 3 + 1
    later = START + 10 * steps  # the second launch
    lines = []
    for n in range(1, steps + 1):
        replicas = 2 if n >= resumed else 4 - (lost <= n < joined)
        more: dict[str, Any] = {
            "lr": 1e-3 * (1 - n / (2 * steps)),
            "grad_norm": 0.5 + 2 / n + 0.01 * (n % 5),
            "gpu_peak_mib": 3072 + 64 * (n // 10),
        }
        if n % 10 == 0:
            more |= {"heldout_loss": 5.125 - 2 * n / steps, "evaluation_ms": 100.0, "checkpoint_ms": 90.0}
        if n >= resumed:
            more["at"] = later + 2 + n
        lines.append(step_line(n, replicas, **more))
    came = {
        "kind": "joined", "joined_ranks": [4], "joined_replicas": [4], "hosts": ["somewhere"], "warm_up_ms": 3000.0,
        "transfer_ms": 110.0, "transfer_bytes": 2**20, "stall_ms": 146.0, "detect_ms": 0.0, "repair_ms": 33.0,
        "redo_ms": 345.8, "restore_ms": 0.0, "extra_microbatches": 0, "redone_microbatches": 0, "boundary": False,
    }  # fmt: skip
    write_lines(place / "steps.jsonl", lines)
    write_lines(
        place / "incidents.jsonl", [incident_line(lost, [1]), incident_line(joined, [], epoch=3, **came)]
    )
    write_lines(
        place / "job.jsonl",
        [
            start_line(4),
            exit_line(1, START + 2 + lost - 0.25, signal="SIGKILL", step=lost),
            {"what": "end", "at": later - 1},
            start_line(2, at=later),
        ],
    )
    settings = {"steps": 2 * steps, "replicas": 2, "global_batch": 16}
    (place / "config.yaml").write_text(yaml.safe_dump(settings))
    return place


def finish(run: Path, ranks: list[int]) -> None:
    """Let the run end: these ranks are through, and the launcher has recorded it."""
    lines = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    at = lines[-1]["at"] + 1
    ends = [exit_line(rank, at, words={"end": "done"}) for rank in ranks]
    with open(run / "job.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in [*ends, {"what": "end", "at": at + 1}])
    (run / "summary.json").write_text(
        json.dumps({"steps": lines[-1]["step"], "final_loss": lines[-1]["loss"]})
    )
