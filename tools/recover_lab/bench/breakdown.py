"""`recover bench breakdown`: parts of the time after a single failure, as the checkpoint interval N grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from recover_lab.bench.measure import begin, machine_line, write
from recover_lab.peers.metrics import recoveries, restart_costs, restarts, warm_steps
from recover_lab.peers.runs import run_baseline, run_ours, scratch
from recover_lab.peers.scene import Scene
from recover_lab.publish import pictures
from recover_lab.publish.figure import Figure, Headline, Results, Rows, describe_grid, show, unpaced_warning


def bench_breakdown(scene: Scene, intervals: Sequence[int], output: Path | None) -> dict[str, Any]:
    """A failure in step 1.5N, N steps between checkpoints: the paper's stamps, of both systems."""
    console = begin(output)
    rows: list[dict[str, Any]] = []
    theirs_all = []
    for every in intervals:
        struck = every * 3 // 2
        scene = scene.but(steps=struck, kills=((struck, scene.replicas - 1),), save_every=every)
        console.print(f"N = {every}: failure in step {struck}, checkpoint-restart ...", style="dim")
        with scratch() as directory:
            events = run_baseline(scene, directory)
        theirs_all.append(events)
        (restart,) = restarts(events)
        console.print(f"N = {every}: failure in step {struck}, ours ...", style="dim")
        with scratch() as directory:
            own = run_ours(scene, directory)
        (recovery,) = recoveries(own, since=every)
        normal = median(warm_steps(own).values())
        rows.append(
            {
                "N": every,
                "step": struck,
                "baseline": restart.to_json(),
                "ours": recovery.to_json(),
                "baseline_cost": restart.H - restart.C,
                "ours_cost": recovery.complete - recovery.failure,
                "step_seconds": normal,
            }
        )
    results = {"scene": scene.to_json(), "rows": rows, "costs": asdict(restart_costs(theirs_all))}
    write(output, {"breakdown": results})
    title = f"One failure in step 1.5N, {scene.replicas} replicas of {scene.replica_size}, seconds"
    show(console, title, FIGURE.rows(results))
    console.print(machine_line())
    return results


def _values(results: Results) -> dict[str, Any]:
    rows, scene = results["rows"], results["scene"]
    ours, last = [row["ours_cost"] for row in rows], rows[-1]
    best = min(rows, key=lambda row: row["baseline_cost"])
    inside = f" of {scene['replica_size']} ranks" if scene["replica_size"] > 1 else ""
    return {
        "setting": f"{scene['replicas']} replicas{inside}",
        "step": f"{sum(row['step_seconds'] for row in rows) / len(rows):.2f} s",
        "ours": f"{min(ours):.2f} to {max(ours):.2f} s",
        "best": f"{best['baseline_cost']:.1f} s",
        "best-every": best["N"],
        "last": f"{last['baseline_cost']:.1f} s",
        "last-every": last["N"],
    }


def _rows(results: Results) -> Rows:
    rows: Rows = [["N", "", "until the step is complete", "parts, in seconds"]]
    for row in results["rows"]:
        for side, name in (("baseline", "restart"), ("ours", "ours")):
            parts = ", ".join(f"{key} {value:.2f}" for key, value in row[side]["pieces"].items())
            rows.append([row["N"], name, f"{row[f'{side}_cost']:.2f} s", parts])
    return rows


def _headlines(kind: str, results: Results) -> Iterator[Headline]:
    rows, scene = results["rows"], results["scene"]
    ours = [row["ours_cost"] for row in rows]
    best = min(rows, key=lambda row: row["baseline_cost"])
    yield (
        f"one failure, {kind.upper()} ({describe_grid(scene)}), from the kill until the step is complete, "
        f"N from {rows[0]['N']} to {rows[-1]['N']}",
        f"{min(ours):.2f} to {max(ours):.2f} s; checkpoint-restart at its best (N = {best['N']}): "
        f"{best['baseline_cost']:.1f} s, at N = {rows[-1]['N']}: {rows[-1]['baseline_cost']:.1f} s"
        f"{unpaced_warning(scene, median(row['step_seconds'] for row in rows))}",
        "flat; lower even at N = 2",
    )


FIGURE = Figure(
    name="breakdown",
    text="One failure in step 1.5N, N steps between the baseline's checkpoints. Failure handling ends when the first "
    "new process starts; restart is everything until training continues, except loading.",
    paper="The baseline's cost grows with N, ours is flat and lower even at N = 2.",
    values=_values,
    rows=_rows,
    headlines=_headlines,
    picture=pictures.breakdown,
)
