"""Kills inside reductions: how a rank times its steps, and what each kill cost by the notes of the survivors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from recover_lab.peers.ended import BenchmarkError

# From the kill until a survivor knows of it; until its repair begins (it aborts its carrier and finishes the microbatch
# that it computes); until the world is repaired; until the sums are restored; until the step commits.
PARTS_OF_A_KILL = ("notice", "drain", "repair", "restore", "redo")
Facts = dict[str, Any]


def timed_steps(
    step: Any,
    replica: int,
    stream: Any,
    last: int,
    run: Callable[[Any], object],
    synchronize: Callable[[], object],
) -> Iterator[Facts]:
    """Run steps up to number `last`; yields of each its duration, time of commit and seconds of redone microbatches.

    `run` computes a microbatch and waits for it; `synchronize` waits until the device has finished the step.
    """
    while step.index < last:
        began, computed = time.time(), list[float]()
        for microbatch in step.microbatches(stream):
            start = time.perf_counter()
            run(microbatch)
            computed.append(time.perf_counter() - start)
        synchronize()
        committed = time.time()
        redone = len(step.samples) - len(step.layout.share(replica).run) if step.incidents else 0
        yield {
            "step": step.index,
            "seconds": committed - began,
            "committed": committed,
            "redone": sum(computed[len(computed) - redone :]) if redone > 0 else 0.0,
            "microbatches": len(step.all_samples),
            "incidents": [incident_facts(incident) for incident in step.incidents],
        }


def incident_facts(incident: Any) -> Facts:
    """An incident of `recover.Step` as benchmarks note it; all durations in seconds."""
    durations = ("detect", "repair", "restore", "redo", "warm_up", "transfer", "stall")
    return {
        "kind": incident.kind,
        "noticed_at": incident.noticed_at,
        "discarded": incident.discarded_microbatches,
        "bytes": incident.transfer_bytes,
        **{name: getattr(incident, f"{name}_ms") / 1e3 for name in durations},
    }


def kill_sample(killed_at: float, survivors: Sequence[Facts]) -> Facts:
    """Seconds from a kill to the commit of its step by the last survivor, and the parts of them on that survivor.

    `survivors` are `committed`, `redone` and `incidents` of that step, of each survivor.
    """
    last = max(survivors, key=lambda each: each["committed"])
    incidents = last["incidents"]
    whole = last["committed"] - killed_at
    return {
        "whole": whole,
        "less_redone": whole - max(each["redone"] for each in survivors),
        "notice": max(0.0, incidents[0]["noticed_at"] - killed_at),
        "drain": sum(each["detect"] for each in incidents),
        **{part: sum(each[part] for each in incidents) for part in ("repair", "restore", "redo")},
        "discarded": sum(incident["discarded"] for each in survivors for incident in each["incidents"]),
    }


def note_kill(run_dir: Path, key: int) -> None:
    """Written by the victim just before its SIGKILL; `key` is a step, or the victim's rank."""
    (run_dir / f"killed-{key}").write_text(repr(time.time()))


def read_kills(run_dir: Path) -> dict[int, float]:
    return {
        int(path.name.removeprefix("killed-")): float(path.read_text()) for path in run_dir.glob("killed-*")
    }


def judge_launch(ranks: Sequence[Facts], killed: dict[int, float]) -> list[Facts]:
    """A sample of each kill of one launch, from the notes of its survivors. `killed`: time of the kill by step.

    Raises BenchmarkError if a step was not committed on the whole batch, if the wrong replicas are left or if
    parameters differ: then the launch is not a measurement.
    """
    first = ranks[0]
    counts = {row["microbatches"] for rank in ranks for row in rank["rows"]}
    if counts != {first["batch"]}:
        raise BenchmarkError(f"steps were committed on {sorted(counts)} microbatches, not {first['batch']}")
    if any(rank["left"] != rank["expected"] for rank in ranks) or len(ranks) != len(first["expected"]):
        raise BenchmarkError(f"replicas {first['left']} are left, and {first['expected']} should be")
    if len({rank["digest"] for rank in ranks}) > 1:
        raise BenchmarkError("survivors hold different parameters: a sum was wrong")
    samples = []
    for step, killed_at in killed.items():
        rows = [row for rank in ranks for row in rank["rows"] if row["step"] == step and row["incidents"]]
        if len(rows) != len(ranks):
            raise BenchmarkError(f"the death in step {step} was not noticed by all survivors in that step")
        samples.append(kill_sample(killed_at, rows))
    return samples
