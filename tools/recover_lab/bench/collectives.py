"""`recover bench collectives` and `recover bench repair`: the speed of the carriers and of the repair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recover_lab.bench.measure import begin, launch_program, machine_line, summary, write
from recover_lab.peers.kills import read_kills
from recover_lab.publish.figure import Figure, Results, Rows, milliseconds, show

REPAIR_LAUNCHES = 3


def bench_collectives(
    ranks: Sequence[int], megabytes: Sequence[float], rounds: int, output: Path | None
) -> None:
    """Time all ways to sum a buffer, for every number of ranks and every size, interleaved in one run."""
    console = begin(output)
    results: dict[str, Any] = {}
    for n in ranks:
        console.print(f"{n} ranks ...", style="dim")
        with launch_program(
            "collectives.py", n, [json.dumps(list(megabytes)), str(rounds)], timeout=300
        ) as run_dir:
            times = json.loads((run_dir / "times.json").read_text())
        results[str(n)] = {
            size: {way: summary(values) for way, values in ways.items()} for size, ways in times.items()
        }
    content = {"collectives_ms": results}
    write(output, content)
    show(console, "all-reduce, fp32: median milliseconds", COLLECTIVES.rows(content))
    for label, slower, faster in (
        ("the mpi carrier is faster than stock gloo", "stock gloo", "mpi carrier"),
        ("... than gloo with the snapshot that it needs", "stock gloo + snapshot", "mpi carrier"),
        ("the probe slows ulfm_allreduce down", "ulfm_allreduce", "mpi in place"),
    ):
        ratios = [
            ways[slower]["median"] / ways[faster]["median"]
            for sizes in results.values()
            for ways in sizes.values()
        ]
        console.print(f"{label}: {min(ratios):.2f} to {max(ratios):.2f} times")
    console.print(machine_line())


def bench_repair(ranks: int, output: Path | None) -> None:
    """Time from SIGKILL to the first reduction of all survivors on the repaired world, one death after the other."""
    console = begin(output)
    results: dict[str, Any] = {}
    for carrier in ("mpi", "gloo"):
        samples: list[float] = []
        for _ in range(REPAIR_LAUNCHES):
            with launch_program("repairs.py", ranks, [carrier]) as run_dir:
                samples += _repair_times(run_dir)
        results[carrier] = summary(samples)
    content = {"repair_ms": results, "ranks": ranks}
    write(output, content)
    show(console, f"SIGKILL to a repaired world, {ranks} ranks down to 1", REPAIR.rows(content))
    console.print(machine_line())


def _repair_times(run_dir: Path) -> list[float]:
    """Milliseconds from each kill until the last survivor has reduced on the repaired world."""
    notes = [json.loads(path.read_text()) for path in run_dir.glob("repaired-*.json")]
    return [
        1e3 * (max(times[str(victim)] for times in notes if str(victim) in times) - killed_at)
        for victim, killed_at in read_kills(run_dir).items()
    ]


def _collectives_values(results: Results) -> dict[str, Any]:
    return {
        f"{ranks}-{float(size):g}": f"{ways['stock gloo']['median'] / ways['mpi carrier']['median']:.1f}x"
        for ranks, sizes in results["collectives_ms"].items()
        for size, ways in sizes.items()
    }


def _collectives_rows(results: Results) -> Rows:
    times = results["collectives_ms"]
    names = list(next(iter(next(iter(times.values())).values())))
    return [["ranks", "MB", *names]] + [
        [ranks, f"{float(size):g}", *(f"{ways[name]['median']:.1f}" for name in names)]
        for ranks, sizes in times.items()
        for size, ways in sizes.items()
    ]


COLLECTIVES = Figure(
    name="collectives",
    text="All-reduce, median milliseconds.",
    values=_collectives_values,
    rows=_collectives_rows,
)


def _repair_values(results: Results) -> dict[str, Any]:
    took = {carrier: f"{facts['median']:.0f} ms" for carrier, facts in results["repair_ms"].items()}
    return {"setting": f"{results['ranks']} ranks", **took}


def _repair_rows(results: Results) -> Rows:
    return [
        ["carrier", "median and middle half", "deaths"],
        *([carrier, milliseconds(facts), facts["n"]] for carrier, facts in results["repair_ms"].items()),
    ]


REPAIR = Figure(
    name="repair",
    text="From SIGKILL to a repaired world with a working carrier.",
    values=_repair_values,
    rows=_repair_rows,
)
