"""`recover bench sweep`: how rare failures must be for checkpoint-restart to be as good."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recover_lab.bench.measure import begin, place, screen, write
from recover_lab.bench.multi import calibrate, duel, kill_steps, recall, show_duel, tell
from recover_lab.peers.costs import PAPER, Costs, Restarting, rerun_steps
from recover_lab.peers.scene import Scene
from recover_lab.publish.tables import rows_of, show

SHARES = [10 ** (exponent / 10) for exponent in range(-22, 6)]  # of the stall in the time between failures
console = screen()


def bench_sweep(
    scene: Scene, factors: Sequence[float], known: Path | None, output: Path | None
) -> dict[str, Any]:
    """Other rates of failure than production's: some measured end to end, all by arithmetic on production's pieces.

    `known` is a file of `recover bench multi` on the same scene; what it holds is not measured again.
    """
    begin(output)
    base = recall("multi", scene, known)
    if base is None:
        calibration = calibrate(scene)
        tell(calibration)
        interval = calibration.production()
        base = duel(scene, interval, [calibration.best_interval(interval, kill_steps(scene, interval))])
        show_duel(base)
    costs = costs_of(base)
    duels = [base]
    for factor in factors:
        interval = max(2, 2 * round(base["interval"] * factor / 2))
        best = costs.baseline.best_interval(interval, kill_steps(scene, interval))
        duels.append(duel(scene, interval, [best]))
        show_duel(duels[-1])
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
    show(console, "times more tokens per second and living rank", rows_of("sweep", results))
    console.print(place())
    return results


def costs_of(duel: dict[str, Any]) -> Costs:
    ours, theirs = duel["ours"], duel["baselines"][-1]
    steps_of = {int(alive): seconds for alive, seconds in ours["steps_of"].items()}  # JSON's keys are text
    return Costs(duel["scene"]["replicas"], Restarting(**theirs["costs"]), ours["recovery"], steps_of)


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
