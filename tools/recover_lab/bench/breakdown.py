"""`recover bench breakdown`: where the time goes after a single failure, as the checkpoint interval N grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from recover_lab.bench.measure import begin, place, write
from recover_lab.peers.metrics import recoveries, restarting, restarts, warm_steps
from recover_lab.peers.runs import run_baseline, run_ours, scratch
from recover_lab.peers.scene import Scene
from recover_lab.publish.tables import rows_of, show


def bench_breakdown(scene: Scene, intervals: Sequence[int], output: Path | None) -> dict[str, Any]:
    """A failure in step 1.5N, N steps between checkpoints: the paper's stamps, on both sides."""
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
    results = {"scene": scene.to_json(), "rows": rows, "costs": asdict(restarting(theirs_all))}
    write(output, {"breakdown": results})
    title = f"One failure in step 1.5N, {scene.replicas} replicas of {scene.replica_size}, seconds"
    show(console, title, rows_of("breakdown", results))
    console.print(place())
    return results
