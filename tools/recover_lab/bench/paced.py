"""`recover bench paced`: one replica becomes slow in the middle of a run with `policy=paced`.

The baseline is in the same run: the steps before that, in which all replicas are equal. Microbatches take their time
by sleeping, so that replicas on few cores behave as if each had its own.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from recover.policy.paced import KNOWN, WINDOW, deal_by_speed
from recover.runs.records.json_lines import read_lines
from recover_lab.bench.measure import PROGRAMS, begin, machine_line, summary, write
from recover_lab.peers.ended import BenchmarkError
from recover_lab.publish.figure import Figure, Headline, Results, Rows, show

WARM = 3  # first steps, which are longer
CALM = KNOWN + WARM + 4  # steps with equal replicas
SETTLED = KNOWN + WINDOW + 1  # steps after the change, in which shares may still change
MEASURED = 8


def bench_paced(
    replicas: int, accum: int, pace: float, factors: Sequence[float], output: Path | None
) -> dict[str, Any]:
    console = begin(output)
    rows = [_measure(replicas, accum, pace, factor) for factor in factors]
    results = {"replicas": replicas, "accum": accum, "pace": pace, "slow": rows}
    write(output, {"paced": results})
    title = f"{replicas} replicas, B = {replicas * accum}, {pace:g} s per microbatch; equal replicas: 1"
    show(console, title, FIGURE.rows(results))
    console.print(machine_line())
    return results


def _measure(replicas: int, accum: int, pace: float, factor: float) -> dict[str, Any]:
    steps = CALM + SETTLED + MEASURED
    lines = _train(replicas, accum, pace, factor, steps)
    calm = [line["seconds"] for line in lines[WARM:CALM]]
    slow = [line["seconds"] for line in lines[CALM + SETTLED :]]
    spread, base = summary(slow), statistics.median(calm)
    best = deal_by_speed(replicas * accum, [1000] * (replicas - 1) + [round(1000 * factor)], least=1)
    return {
        "factor": factor,
        "ratio": spread["median"] / base,
        "low": spread["low"] / base,
        "high": spread["high"] / base,
        "optimum": max(*best[:-1], factor * best[-1]) / accum,
        "shares": [
            (after["step"], list(after["shares"].values()))
            for before, after in pairwise([{"shares": {}}, *lines])
            if before["shares"] != after["shares"]
        ],
    }


def _train(replicas: int, accum: int, pace: float, factor: float, steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="recover-bench-") as directory:
        run_dir = Path(directory, "run")
        numbers = map(str, (pace, factor, CALM, steps, replicas * accum))
        command = [sys.executable, "-m", "recover.cli", "run", "-n", str(replicas), "--run-dir", str(run_dir)]
        ended = subprocess.run(
            [*command, str(PROGRAMS / "paced.py"), *numbers],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ended.returncode:
            raise BenchmarkError(
                f"the run with factor {factor:g} ended with {ended.returncode}: {ended.stdout}"
            )
        return list(read_lines(run_dir / "steps.jsonl"))


def _told(sizes: Sequence[int]) -> str:
    """`35, 6 x 34, 17`"""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][1] == size:
            runs[-1][0] += 1
        else:
            runs.append([1, size])
    return ", ".join(f"{count} x {size}" if count > 1 else str(size) for count, size in runs)


def _values(results: Results) -> dict[str, Any]:
    return {f"slow-{row['factor']:g}": f"{row['ratio']:.2f}x" for row in results["slow"]}


def _rows(results: Results) -> Rows:
    rows: Rows = [
        ["slow by", "equal shares", "optimum", "paced shares", "against the optimum", "shares by step"]
    ]
    for row in results["slow"]:
        rows.append(
            [
                f"{row['factor']:g}",
                f"{row['factor']:.2f}x",
                f"{row['optimum']:.3f}x",
                f"{row['ratio']:.3f}x ({row['low']:.3f} to {row['high']:.3f})",
                f"{row['ratio'] / row['optimum']:.3f}",
                "; ".join(f"from {step}: {_told(sizes)}" for step, sizes in row["shares"]),
            ]
        )
    return rows


def _headlines(kind: str, results: Results) -> Iterator[Headline]:
    for row in results["slow"]:
        told = f"{row['ratio']:.2f}x, optimum {row['optimum']:.2f}x"
        yield f"step with one replica of {results['replicas']} slow by {row['factor']:g}, paced", told, ""


FIGURE = Figure(
    name="paced",
    text="Paced shares: a step with one slow replica, as a multiple of a step of equal replicas in the same run. "
    "Equal shares would take the factor itself.",
    values=_values,
    rows=_rows,
    headlines=_headlines,
)
