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
    """Steps of one second, the first of them two seconds after the start."""
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
