"""`recover bench multi --return`: failure after failure, and every lost replica rejoins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from recover.runs.records.kinds import Event
from recover_lab.bench.measure import begin, machine_line, make_console, write
from recover_lab.bench.multi import calibrate, kill_steps, print_costs, read_known
from recover_lab.bench.sweep import SHARES
from recover_lab.peers.costs import RejoinCosts, RestartCosts
from recover_lab.peers.ended import BenchmarkError
from recover_lab.peers.metrics import failures, recovery_seconds, restart_costs, steps_by_alive
from recover_lab.peers.rejoin import joins
from recover_lab.peers.runs import run_baseline, run_ours_rejoining, scratch
from recover_lab.peers.scene import Scene
from recover_lab.publish.figure import STALL_SHARE, Figure, Results, Rows, show

HOUR = 3600.0


def bench_multi_rejoining(
    scene: Scene,
    interval: int | None,
    factors: Sequence[float],
    output: Path | None,
    known: Path | None = None,
) -> dict[str, Any]:
    """Tokens an hour against checkpoint-restart: measured at these multiples of the interval, arithmetic in between.

    `known` is a file of `recover bench breakdown` on the same scene, which has the costs of a restart.
    """
    begin(output)
    console = make_console()
    found = read_known("breakdown", scene, known)
    costs = RestartCosts(**found["costs"]) if found else calibrate(scene)
    print_costs(costs)
    first = interval or costs.production()
    duels = []
    for factor in factors:
        every = max(2, 2 * round(first * factor / 2))
        kills = tuple(zip(kill_steps(scene, every), scene.victims(), strict=True))
        whole = scene.but(steps=kills[-1][0] + every, kills=kills)
        console.print(f"a failure every {every} steps: ours, with rejoining replicas ...", style="dim")
        with scratch() as directory:
            ours = run_ours_rejoining(whole, directory)
        best = costs.best_interval(every, [step for step, _ in kills])
        console.print(
            f"a failure every {every} steps: checkpoint-restart, saving every {best} ...", style="dim"
        )
        with scratch() as directory:
            theirs = run_baseline(whole.but(save_every=best), directory)
        duels.append(_duel(whole, every, best, ours, theirs))
    pieces = _pieces(duels)
    results = {
        "scene": scene.to_json(),
        "duels": [{name: each[name] for name in each if name != "pieces"} for each in duels],
        "costs": pieces.to_json(),
        "calm_ratio": pieces.calm_ratio,
        "share": SHARES,
        "wall": [pieces.wall_ratio(pieces.steps_between(share)) for share in SHARES],
        "crossing": pieces.crossing(),
    }
    write(output, {"returning": results})
    title = f"{scene.replicas} replicas of {scene.replica_size} that rejoin: tokens an hour"
    show(console, title, FIGURE.rows(results))
    console.print(machine_line())
    return results


def _duel(
    scene: Scene, interval: int, save_every: int, ours: Sequence[Event], theirs: Sequence[Event]
) -> dict[str, Any]:
    speeds = [_tokens_an_hour(scene, events) for events in (ours, theirs)]
    away, stalls = _away(ours, scene.replicas), [join["stall"] for join in joins(ours)]
    alive, costs = steps_by_alive(ours), restart_costs([theirs])
    duel: dict[str, Any] = {
        "interval": interval,
        "save_every": save_every,
        "share": costs.stall / (interval * costs.step),
        "ours": speeds[0],
        "restart": speeds[1],
        "ratio": speeds[0] / speeds[1],
        "away": away,
        "stalls": stalls,
    }
    if away and stalls:
        duel["pieces"] = RejoinCosts(
            scene.replicas,
            costs,
            recovery_seconds(ours),
            fmean(stalls),
            fmean(away),
            alive[scene.replicas],
            alive.get(scene.replicas - 1, alive[scene.replicas]),
        )
    return duel


def _pieces(duels: Sequence[dict[str, Any]]) -> RejoinCosts:
    """Costs from the run with the rarest failures: most of its steps have all replicas, or one less."""
    whole = [each for each in duels if "pieces" in each]
    if not whole:
        raise BenchmarkError(
            f"no replica rejoined within {max(each['interval'] for each in duels)} steps: give a longer --interval, "
            "or a larger --pace"
        )
    pieces: RejoinCosts = max(whole, key=lambda each: each["interval"])["pieces"]
    return pieces


def _tokens_an_hour(scene: Scene, events: Sequence[Event]) -> float:
    """Tokens an hour from the first failure to the end of the last step."""
    first = failures(events)[0]
    end = max(e["at"] for e in events if e["what"] == "step-end" and e["step"] == scene.steps)
    return (scene.steps - first["step"]) * scene.tokens_per_step / (end - first["at"]) * HOUR


def _away(events: Sequence[Event], replicas: int) -> list[float]:
    """Seconds from each death until a commit with as many replicas as before, for replicas that rejoined."""
    seen = []
    commits = sorted((e["at"], e["replicas"]) for e in events if e["what"] == "step-end")
    for death in failures(events):
        before = [count for at, count in commits if at < death["at"]] or [replicas]
        less = [at for at, count in commits if at > death["at"] and count < before[-1]]
        again = [at for at, count in commits if less and at > less[0] and count >= before[-1]]
        seen += [again[0] - death["at"]] if again else []
    return seen


def _values(results: Results) -> dict[str, Any]:
    return {
        "ratios": ", ".join(f"{duel['ratio']:.2f}x" for duel in results["duels"]),
        "calm": f"{results['calm_ratio']:.2f}x",
        "crossing": "never" if results["crossing"] is None else f"{results['crossing']:.1%}",
    }


def _rows(results: Results) -> Rows:
    rows: Rows = [
        ["stall of a restart", "ours, an hour", "checkpoint-restart", "ours against it", "rejoined after"]
    ]
    for duel in results["duels"]:
        rows.append(
            [
                f"{duel['share']:.0%} of {STALL_SHARE} (a failure every {duel['interval']})",
                *(f"{duel[side]:,.0f}" for side in ("ours", "restart")),
                f"{duel['ratio']:.2f} times",
                ", ".join(f"{seconds:.1f} s" for seconds in duel["away"]) or "not in time",
            ]
        )
    crossing, calm = results["crossing"], f"{results['calm_ratio']:.2f} times without failures"
    never = f"by arithmetic at every rate at least {calm}"
    rows.append(
        [never if crossing is None else f"below {calm} while it is under {crossing:.1%}", "", "", "", ""]
    )
    return rows


FIGURE = Figure(
    name="returning",
    text="Failure after failure, and every lost replica rejoins: tokens an hour against checkpoint-restart.",
    values=_values,
    rows=_rows,
)
