"""`recover bench breakdown`: where the time goes after a single failure, as the checkpoint interval N grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from recover.bench.measure import place, screen, write
from recover.bench.metrics import recoveries, restarting, restarts, step_seconds
from recover.bench.runs import run_baseline, run_ours, scratch
from recover.bench.scene import Scene

RESTART_PIECES = ("save", "normal", "handling", "load", "restart", "rerun")
RECOVERY_PIECES = ("normal", "detect", "repair", "restore", "redo")


def bench_breakdown(scene: Scene, intervals: Sequence[int], output: Path | None) -> dict[str, Any]:
    """A failure in step 1.5N, N steps between checkpoints: the paper's stamps, on both sides."""
    console = screen()
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
        normal = median(step_seconds(own).values())
        rows.append(
            {
                "N": every,
                "step": struck,
                "baseline": restart.to_json(),
                "ours": recovery.to_json(),
                "baseline_cost": restart.pieces()["save"] + restart.H - restart.C,
                "ours_cost": recovery.complete - recovery.failure,
                "step_seconds": normal,
            }
        )
    results = {"scene": scene.to_json(), "rows": rows, "costs": asdict(restarting(theirs_all))}
    write(output, {"breakdown": results})
    table = Table(
        title=f"One failure in step 1.5N, {scene.replicas} replicas of {scene.replica_size}, seconds",
        title_justify="left",
    )
    for column in ("N", *RESTART_PIECES, "cost", "ours:", *RECOVERY_PIECES[1:], "cost", "times less"):
        table.add_column(column, justify="right")
    for row in rows:
        theirs, ours = row["baseline"]["pieces"], row["ours"]["pieces"]
        table.add_row(
            str(row["N"]),
            *(f"{theirs[name]:.2f}" for name in RESTART_PIECES),
            f"{row['baseline_cost']:.2f}",
            "",
            *(f"{ours[name]:.3f}" for name in RECOVERY_PIECES[1:]),
            f"{row['ours_cost']:.2f}",
            f"{row['baseline_cost'] / row['ours_cost']:.1f}",
        )
    console.print(table)
    console.print(
        "cost: from the failure until that step is complete; the baseline's with one save, and without `normal`"
    )
    console.print(place())
    return results
