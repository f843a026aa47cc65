"""`recover bench verify`: what verified gradients cost, as the ratio of step times with and without them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recover_lab.bench.measure import begin, machine_line, make_console, write
from recover_lab.peers.ended import BenchmarkError
from recover_lab.peers.runs import scratch
from recover_lab.publish.figure import Figure, Headline, Results, Rows, show

LIMIT = 1800.0  # seconds of one run
SKIPPED = 3  # first steps, one of which checks the kernels


def bench_verify(
    batches: Sequence[int],
    replicas: int,
    slots: int,
    steps: int,
    pace: float,
    turns: int,
    output: Path | None,
) -> dict[str, Any]:
    """Median step times of runs in turns, for each B. A step with verify=K has the work of its longest share, which is
    one microbatch longer on the replica that computes a slot of another."""
    begin(output)
    console, rows = make_console(), []
    for batch in batches:
        plain, verified = [], []
        for turn in range(turns):
            console.print(f"B = {batch}, turn {turn + 1} of {turns} ...", style="dim")
            plain.append(_step_seconds(batch, replicas, 0, steps, pace))
            verified.append(_step_seconds(batch, replicas, slots, steps, pace))
        ratios = [one / other for one, other in zip(verified, plain, strict=True)]
        share = -(-batch // replicas)
        rows.append(
            {
                "batch": batch,
                "plain": statistics.median(plain),
                "verified": statistics.median(verified),
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "longest_share": (share + 1) / share,
            }
        )
    results = {"replicas": replicas, "slots": slots, "steps": steps, "pace": pace, "batches": rows}
    write(output, {"verify": results})
    show(console, f"verify={slots} on {replicas} replicas", FIGURE.rows(results))
    console.print(machine_line())
    return results


def _step_seconds(batch: int, replicas: int, slots: int, steps: int, pace: float) -> float:
    with scratch() as directory:
        words = [
            f"replicas={replicas}",
            f"global_batch={batch}",
            f"verify={slots}",
            f"steps={steps}",
            f"pace={pace}",
            "model=tiny",
            "seq_len=64",
            "checkpoint.every=0",
            "log.tensorboard=false",
        ]
        command = [sys.executable, "-m", "recover.cli", "train", *words, "--run-dir", str(directory / "run")]
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT
        )
        if ended.returncode:
            raise BenchmarkError(
                f"{' '.join(command)} has ended with {ended.returncode}:\n{ended.stdout[-2000:]}"
            )
        lines = (directory / "run" / "steps.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["seconds"] for line in lines[SKIPPED:])


def _values(results: Results) -> dict[str, Any]:
    return {f"b{row['batch']}": f"{row['ratio']:.2f}x" for row in results["batches"]}


def _rows(results: Results) -> Rows:
    rows: Rows = [["B", "step", "step, verified", "ratio", "longest share"]]
    for row in results["batches"]:
        rows.append(
            [
                str(row["batch"]),
                f"{row['plain'] * 1e3:.1f} ms",
                f"{row['verified'] * 1e3:.1f} ms",
                f"{row['ratio']:.3f} ({row['least']:.3f} to {row['most']:.3f})",
                f"{row['longest_share']:.3f}",
            ]
        )
    return rows


def _headlines(kind: str, results: Results) -> Iterator[Headline]:
    for row in results["batches"]:
        yield f"step with verify={results['slots']}, B = {row['batch']}", f"{row['ratio']:.2f}x", ""


FIGURE = Figure(
    name="verify",
    text="Verified gradients: step time with verify=1 against verify=0 in the same run.",
    values=_values,
    rows=_rows,
    headlines=_headlines,
)
