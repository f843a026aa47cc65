"""`recover bench collectives` and `recover bench repair`: the speed of the carriers and of the repair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from recover_lab.bench.measure import begin, launched, place, summary, write

REPAIR_LAUNCHES = 3


def bench_collectives(
    ranks: Sequence[int], megabytes: Sequence[float], rounds: int, output: Path | None
) -> None:
    """All ways to sum a buffer, at every number of ranks and every size, interleaved in one run per number of ranks."""
    console = begin(output)
    results: dict[str, Any] = {}
    for n in ranks:
        console.print(f"{n} ranks ...", style="dim")
        with launched(
            "collectives.py", n, [json.dumps(list(megabytes)), str(rounds)], timeout=300
        ) as run_dir:
            times = json.loads((run_dir / "times.json").read_text())
        results[str(n)] = {
            size: {way: summary(values) for way, values in ways.items()} for size, ways in times.items()
        }
    write(output, {"collectives_ms": results})
    for count, sizes in results.items():
        table = Table(
            title=f"all-reduce over {count} ranks: median ms (middle half), fp32", title_justify="left"
        )
        table.add_column("")
        for size in sizes:
            table.add_column(f"{size} MB", justify="right")
        for way in next(iter(sizes.values())):
            table.add_row(way, *(_cell(ways[way]) for ways in sizes.values()))
        table.add_section()
        for label, ours, theirs in (
            ("mpi carrier, times faster than stock gloo", "stock gloo", "mpi carrier"),
            ("... than gloo with the snapshot it needs", "stock gloo + snapshot", "mpi carrier"),
            ("cost of the probe (ulfm_allreduce / in place)", "ulfm_allreduce", "mpi in place"),
        ):
            ratios = (ways[ours]["median"] / ways[theirs]["median"] for ways in sizes.values())
            table.add_row(label, *(f"{ratio:.2f}" for ratio in ratios))
        console.print(table)
    console.print(place())


def bench_repair(ranks: int, output: Path | None) -> None:
    """From SIGKILL to the first reduction on the repaired world, over all survivors, one death after the other."""
    console = begin(output)
    results: dict[str, Any] = {}
    for carrier in ("mpi", "gloo"):
        samples: list[float] = []
        for _ in range(REPAIR_LAUNCHES):
            with launched("repairs.py", ranks, [carrier]) as run_dir:
                samples += _repair_times(run_dir, ranks)
        results[carrier] = summary(samples)
    write(output, {"repair_ms": results, "ranks": ranks})
    table = Table(title=f"kill to a repaired world with a working carrier, {ranks} ranks down to 1, ms")
    for column in ("carrier", "median", "middle half", "deaths"):
        table.add_column(column, justify="right")
    for carrier, facts in results.items():
        half = f"{facts['low']:.0f} .. {facts['high']:.0f}"
        table.add_row(carrier, f"{facts['median']:.0f}", half, str(facts["n"]))
    console.print(table)
    console.print(place())


def _repair_times(run_dir: Path, ranks: int) -> list[float]:
    repaired: dict[int, float] = {}
    for path in run_dir.glob("repaired-*.json"):
        for victim, when in json.loads(path.read_text()).items():
            repaired[int(victim)] = max(when, repaired.get(int(victim), 0.0))
    return [
        (repaired[victim] - float((run_dir / f"killed-{victim}").read_text())) * 1e3
        for victim in range(1, ranks)
    ]


def _cell(facts: dict[str, float]) -> str:
    return f"{facts['median']:.2f} ({facts['low']:.2f}-{facts['high']:.2f})"
