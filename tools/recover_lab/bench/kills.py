"""Kills inside reductions on one host, measured: for `recover bench recovery` and `recover bench gpu`."""

from __future__ import annotations

import json
from typing import Any

from recover_lab.bench.measure import PEER_PROGRAMS, BenchmarkError, launch_program, summary
from recover_lab.peers.kills import PARTS_OF_A_KILL, judge_launch, read_kills

NO_PROGRESS = 90.0  # seconds without output after which a launch is ended
ACCUM = 4  # microbatches of a replica in a step


def sequence_length(model: str) -> int:
    return {"tiny": 32, "small": 256}.get(model, 1024)


def measure_kills(
    model: str, carrier: str, replicas: int, deaths: int, launches: int, device: str
) -> dict[str, Any]:
    """Launches with deaths, every death inside the reduction of another step.

    A launch that fails is counted in `broken`, and the others give the figures. Raises BenchmarkError if all fail.
    """
    samples: list[dict[str, Any]] = []
    steps: list[float] = []
    broken: list[str] = []
    survivors: list[dict[str, Any]] = []
    for seed in range(launches):
        arguments = [device, model, *map(str, (sequence_length(model), ACCUM, deaths, seed))]
        try:
            with launch_program(
                PEER_PROGRAMS / "kills.py", replicas, arguments, NO_PROGRESS, carrier=carrier
            ) as run_dir:
                found = [json.loads(path.read_text()) for path in sorted(run_dir.glob("rows-*.json"))]
                samples += judge_launch(found, read_kills(run_dir))
        except BenchmarkError as error:
            broken.append(str(error))
            continue
        survivors = found
        # The first step warms up.
        steps += [1e3 * row["seconds"] for rank in found for row in rank["rows"][1:] if not row["incidents"]]
    if not samples:
        raise BenchmarkError("; ".join(broken))

    def of_all(part: str) -> dict[str, float]:
        return summary([1e3 * sample[part] for sample in samples])

    return {
        "place": {key: survivors[0][key] for key in ("card", "cards", "nccl")},
        "model": model,
        "replicas": replicas,
        "microbatches": survivors[0]["batch"],
        "deaths": len(samples),
        "launches": launches,
        "broken": broken,
        "discarded": sum(sample["discarded"] for sample in samples),
        "kill_to_commit_ms": of_all("whole"),
        "less_redone_ms": of_all("less_redone"),
        "parts_ms": {part: of_all(part) for part in PARTS_OF_A_KILL},
        "step_ms": summary(steps),
    }
