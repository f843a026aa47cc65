"""`recover bench sweep`: the rate of failures at which checkpoint-restart is as good."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recover_lab.bench.measure import begin, machine_line, make_console, write
from recover_lab.bench.multi import (
    calibrate,
    compare_systems,
    kill_steps,
    print_costs,
    read_known,
    show_comparison,
)
from recover_lab.peers.costs import PAPER, Costs, RestartCosts, rerun_steps
from recover_lab.peers.scene import Scene
from recover_lab.publish import pictures
from recover_lab.publish.figure import STALL_SHARE, Figure, Headline, Results, Rows, percent, show

SHARES = [
    10 ** (exponent / 10) for exponent in range(-22, 6)
]  # the stall as a share of the time between failures
console = make_console()


def bench_sweep(
    scene: Scene, factors: Sequence[float], known: Path | None, output: Path | None
) -> dict[str, Any]:
    """Other rates of failure than in production: some measured end to end, all by arithmetic on measured parts.

    `known` is a file of `recover bench multi` on the same scene, which is then not measured again.
    """
    begin(output)
    base = read_known("multi", scene, known)
    if base is None:
        calibration = calibrate(scene)
        print_costs(calibration)
        interval = calibration.production()
        base = compare_systems(
            scene, interval, [calibration.best_interval(interval, kill_steps(scene, interval))]
        )
        show_comparison(base)
    costs = costs_of(base)
    duels = [base]
    for factor in factors:
        interval = max(2, 2 * round(base["interval"] * factor / 2))
        best = costs.baseline.best_interval(interval, kill_steps(scene, interval))
        duels.append(compare_systems(scene, interval, [best]))
        show_comparison(duels[-1])
    shrunken = [alive for alive in costs.steps_of if alive < scene.replicas]
    results: dict[str, Any] = {
        "scene": scene.to_json(),
        "costs": costs.to_json(),
        "production_share": costs.share(costs.baseline.production()),
        "curves": [
            {
                "alive": n,
                "share": SHARES,
                "effective": [costs.effective_ratio(costs.steps_between(share), n) for share in SHARES],
                "wall": [costs.wall_ratio(costs.steps_between(share), n) for share in SHARES],
                "crossing_effective": costs.crossing(n, per_living_rank=True),
                "crossing_wall": costs.crossing(n, per_living_rank=False),
                "paper": {name: costs.crossing(n, True, level) for name, level in PAPER.items()},
            }
            for n in shrunken
        ],
        "measured": [point for each in duels for point in compare_with_arithmetic(costs, each)],
    }
    write(output, {"sweep": results})
    show(console, "times more tokens per second and living rank", FIGURE.rows(results))
    console.print(machine_line())
    return results


def costs_of(duel: dict[str, Any]) -> Costs:
    ours, theirs = duel["ours"], duel["baselines"][-1]
    steps_of = {int(alive): seconds for alive, seconds in ours["steps_of"].items()}  # JSON's keys are text
    return Costs(duel["scene"]["replicas"], RestartCosts(**theirs["costs"]), ours["recovery"], steps_of)


def compare_with_arithmetic(costs: Costs, duel: dict[str, Any]) -> list[dict[str, Any]]:
    theirs, interval = duel["baselines"][-1], duel["interval"]
    kills = [step for step, _ in duel["scene"]["kills"]]
    share = costs.share(interval)
    rerun = rerun_steps(kills, theirs["save_every"])
    points = []
    for lost, ratio in enumerate(theirs["ratios"], start=1):
        alive = costs.replicas - lost
        predicted = costs.effective_ratio(interval, alive, theirs["save_every"], rerun)
        points.append(
            {
                "interval": interval,
                "share": share,
                "alive": alive,
                "measured": ratio,
                "predicted": predicted,
            }
        )
    return points


def _values(results: Results) -> dict[str, Any]:
    return {
        f"per-hour-{curve['alive']}": "any"
        if curve["crossing_wall"] is None
        else f"{curve['crossing_wall']:.0%}"
        for curve in results["curves"]
    }


def _rows(results: Results) -> Rows:
    rows: Rows = [
        [
            "alive",
            "better per living rank while a stall is more than",
            "better per hour while it is more than",
        ]
    ]
    for curve in results["curves"]:
        shares = (curve["crossing_effective"], curve["crossing_wall"])
        rows.append(
            [curve["alive"], *(percent(share, "always", after=f" of {STALL_SHARE}") for share in shares)]
        )
    for point in results["measured"]:
        ratios = f"{point['measured']:.2f} times measured, {point['predicted']:.2f} by arithmetic"
        rows.append([point["alive"], f"at {point['share']:.0%}", ratios])
    return rows


def _headlines(kind: str, results: Results) -> Iterator[Headline]:
    replicas = results["scene"]["replicas"]
    for curve in results["curves"]:
        effective, wall = (
            percent(share, "always", "while a restart's stall is above ", f" of {STALL_SHARE}")
            for share in (curve["crossing_effective"], curve["crossing_wall"])
        )
        yield (
            f"ahead of checkpoint-restart with {curve['alive']} of {replicas} replicas left",
            f"per living rank {effective}; per hour {wall}",
            "",
        )
    half = results["curves"][-1]
    reached = ", ".join(f"{name} at {percent(share, 'any rate')}" for name, share in half["paper"].items())
    yield (
        f"where the paper's figures are reached per living rank, {half['alive']} of {replicas} replicas left",
        f"stall / time of the steps between failures: {reached}",
        "2.23 times, +74.9% (3D), +47.4% (HSDP)",
    )


FIGURE = Figure(
    name="sweep",
    text="Failures at lower rates. Curves are arithmetic on measured parts: between two failures the baseline takes F "
    "steps, F/N saves, one stall and N/2 steps again, at the N that is best for it; ours takes F steps of the "
    "survivors and one recovery. Dots are measured end to end.",
    paper="Restarts take about 10 minutes on 100,000 GPUs, where failures come every 18 minutes.",
    values=_values,
    rows=_rows,
    headlines=_headlines,
    picture=pictures.sweep,
)
