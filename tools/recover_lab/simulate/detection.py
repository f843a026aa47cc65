"""Time until `verify=K` finds a device that errs: the checks of a step as ReCoVer plans them, and a
device that errs in each microbatch with a probability."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from statistics import fmean, quantiles
from typing import Any

from recover.step.verification import turn_of
from recover_lab.simulate.number_words import figure, many
from recover_lab.simulate.scenario import Scenario

TRIALS = 2000
WORK = 4_000_000  # checks that are looked at, at the most, for the usual number of trials


@dataclass(frozen=True)
class Detection:
    """Steps from the first error until the replica is evicted; wrong microbatches committed before."""

    slots: int
    errs: float
    mean_steps: float
    median_steps: float
    late_steps: float  # 99 of 100 devices are found by then
    mean_seconds: float
    late_seconds: float
    wrong_committed: float  # mean number of wrong microbatches in committed steps

    def sentence(self) -> str:
        """A sentence for the answer of `recover simulate`."""
        return (
            f"With verify={self.slots}, a device that errs in {figure(self.errs)} of its microbatches is found after "
            f"{many(round(self.mean_steps), 'step')} on average ({_time(self.mean_seconds)}), 99 of 100 within "
            f"{many(round(self.late_steps), 'step')} ({_time(self.late_seconds)}); {figure(self.wrong_committed)} "
            "wrong microbatches are committed before. Without verify it is not found."
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def steps_to_detection(
    replicas: int, slots: int, errs: float, trials: int = TRIALS, seed: int = 0
) -> list[int]:
    """Simulate `trials` devices that err: for each, the steps until a verified microbatch of it is wrong, first and
    last included. `slots`: verified in each step; `errs`: probability that one of its microbatches is wrong."""
    rng = random.Random(f"detection/{seed}/{replicas}/{slots}/{errs}")
    found = []
    for _ in range(trials):
        erring, first = rng.randrange(replicas), rng.randrange(replicas * max(1, replicas - 1))
        number, wrong = first * slots, False
        while not wrong:
            place, other = turn_of(number, replicas, replicas)
            shadow = other + (other >= place)  # places among the others skip the owner
            wrong = erring in (place, shadow) and rng.random() < errs
            number += 1
        found.append(-(-(number - first * slots) // slots))
    return found


def detection(scenario: Scenario) -> Detection | None:
    """Time until a device that errs is found; None if the scenario verifies nothing."""
    slots, errs = scenario.verify.slots, scenario.verify.errs
    if not slots:
        return None
    # One check in replicas / 2 has the replica in its pair.
    trials = max(200, min(TRIALS, int(WORK * errs / scenario.replicas)))
    steps = steps_to_detection(scenario.replicas, slots, errs, trials)
    cuts, mean = quantiles(steps, n=100), fmean(steps)
    second = scenario.full_step
    committed = (mean - 1) * scenario.job.accum * errs
    return Detection(slots, errs, mean, cuts[49], cuts[98], mean * second, cuts[98] * second, committed)


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
