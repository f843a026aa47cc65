"""Deaths inside reductions, as the survivors of one launch noted them: what each took, and whether the laws held."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from recover_lab.peers.ended import BenchmarkError

# From the kill until a survivor knows; until its repair begins (its carrier is aborted, what was dealt is finished);
# until the world is whole; until the sums are rewound; until the step commits.
PARTS_OF_A_KILL = ("notice", "drain", "repair", "restore", "redo")
Facts = dict[str, Any]


def timed_steps(
    step: Any,
    replica: int,
    stream: Any,
    last: int,
    run: Callable[[Any], object],
    through: Callable[[], object],
) -> Iterator[Facts]:
    """Take steps up to number `last`; of each, how long it took, when it was committed, and what running again took.

    `run` computes a microbatch, to its end; `through` waits until the device is through with a step.
    """
    while step.index < last:
        began, computed = time.time(), list[float]()
        for microbatch in step.microbatches(stream):
            start = time.perf_counter()
            run(microbatch)
            computed.append(time.perf_counter() - start)
        through()
        committed = time.time()
        redone = len(step.samples) - len(step.layout.share(replica).run) if step.incidents else 0
        yield {
            "step": step.index,
            "seconds": committed - began,
            "committed": committed,
            "redone_seconds": sum(computed[len(computed) - redone :]) if redone > 0 else 0.0,
        }


def judge(ranks: Sequence[Facts], killed: dict[int, float]) -> list[Facts]:
    """One launch: what each death took, on its slowest survivor. Raises BenchmarkError where a law was broken."""
    first = ranks[0]
    counts = {row["microbatches"] for rank in ranks for row in rank["rows"]}
    if counts != {first["batch"]}:
        raise BenchmarkError(f"steps were committed on {sorted(counts)} microbatches, not {first['batch']}")
    if any(rank["left"] != rank["expected"] for rank in ranks) or len(ranks) != len(first["expected"]):
        raise BenchmarkError(f"replicas {first['left']} are left, and {first['expected']} should be")
    if len({rank["digest"] for rank in ranks}) > 1:
        raise BenchmarkError("survivors hold different parameters: a sum was wrong")
    samples = []
    for step, when in killed.items():
        rows = [row for rank in ranks for row in rank["rows"] if row["step"] == step and row["incidents"]]
        if len(rows) != len(ranks):
            raise BenchmarkError(f"the death in step {step} was not noticed by all survivors in that step")
        last = max(rows, key=lambda row: row["committed"])
        incidents = last["incidents"]
        sample = {
            "total": 1e3 * (last["committed"] - when),
            "redone": 1e3 * max(row["redone_seconds"] for row in rows),
            "notice": 1e3 * max(0.0, incidents[0]["noticed_at"] - when),
            "drain": sum(each["detect_ms"] for each in incidents),
            "discarded": sum(each["discarded_microbatches"] for each in incidents),
        }
        for part in ("repair", "restore", "redo"):
            sample[part] = sum(each[f"{part}_ms"] for each in incidents)
        samples.append(sample)
    return samples
