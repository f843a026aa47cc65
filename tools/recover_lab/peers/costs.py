"""What failures cost at other rates than those measured: arithmetic on measured pieces.

The baseline, from one failure to the next, with F steps between them and a checkpoint every N:

    F steps + F/N saves + one stall (failure handling, restart, load) + the steps since the last checkpoint, mostly N/2

Ours: F steps by the survivors + one recovery. Which of the two is better depends on one ratio: the stall against the
time between failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# The production system that the paper cites: a failure every 18 minutes, 10 of which go by without progress.
PRODUCTION_LOST, PRODUCTION_PROGRESS = 10.0, 8.0
PAPER = {
    "2.23 times": 2.23,
    "+74.9%": 1.749,
    "+47.4%": 1.474,
}  # more per living rank; tokens at equal GPU-hours


@dataclass(frozen=True)
class RestartCosts:
    """The baseline's seconds."""

    step: float
    save: float  # that training waits for
    stall: float  # from a failure until training goes on

    def between_failures(self, steps: float, every: float, rerun: float | None = None) -> float:
        """Seconds from one failure to the next; by default half a checkpoint interval is run again."""
        lost = every / 2 if rerun is None else rerun
        return (steps + lost) * self.step + steps / every * self.save + self.stall

    def best_interval(self, steps: float, kills: Sequence[int] = ()) -> int:
        """Steps between checkpoints at which the baseline loses least; `kills`: to failures in these very steps."""
        return min(
            range(1, max(1, int(steps)) + 1),
            key=lambda every: self.between_failures(
                steps, every, rerun_steps(kills, every) if kills else None
            ),
        )

    def production(self) -> int:
        """Steps between failures at which this baseline, at its best, makes as little progress as production does."""
        steps = 1.0
        for _ in range(20):  # what is run again depends on the checkpoints, and they on the failures
            lost = self.between_failures(steps, self.best_interval(steps)) - steps * self.step
            steps = lost / PRODUCTION_LOST * PRODUCTION_PROGRESS / self.step
        return max(2, 2 * round(steps / 2))  # even: the first failure strikes at one and a half


@dataclass(frozen=True)
class Costs:
    """Both sides, measured under the same failures."""

    replicas: int
    baseline: RestartCosts
    recovery: float  # ours: what a failure adds to the step that it strikes
    steps_of: dict[int, float]  # ours: a step with so many replicas alive

    def ours(self, steps: float, alive: int) -> float:
        """Seconds from one failure to the next."""
        return steps * self.steps_of[alive] + self.recovery

    def wall_ratio(
        self, steps: float, alive: int, every: int | None = None, rerun: float | None = None
    ) -> float:
        """How many times faster ours is: the baseline is back at full size, ours goes on with fewer."""
        every = every or self.baseline.best_interval(steps)
        return self.baseline.between_failures(steps, every, rerun) / self.ours(steps, alive)

    def effective_ratio(
        self, steps: float, alive: int, every: int | None = None, rerun: float | None = None
    ) -> float:
        """The same per living rank: the paper's metric."""
        return self.wall_ratio(steps, alive, every, rerun) * self.replicas / alive

    def share(self, steps: float) -> float:
        """The stall against the time that so many steps take."""
        return self.baseline.stall / (steps * self.baseline.step)

    def steps_between(self, share: float) -> float:
        """Steps between failures at which the stall is this share of the time that they take."""
        return self.baseline.stall / (share * self.baseline.step)

    def crossing(self, alive: int, per_living_rank: bool, level: float = 1.0) -> float | None:
        """The stall above which ours is so many times better, as a share of the time of the steps between failures.

        None: it is however rare failures are, as far as the few percent between two runs can tell.
        """
        ratio = self.effective_ratio if per_living_rank else self.wall_ratio
        low, high = 1e-4, 1e2
        if ratio(self.steps_between(low), alive) > level:
            return None
        for _ in range(60):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if ratio(self.steps_between(middle), alive) < level else (low, middle)
        return high

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RejoinCosts:
    """Both sides, where our lost replicas come back. Seconds, measured under the same failures."""

    replicas: int
    baseline: RestartCosts
    recovery: float  # ours: what a failure adds to the step that it strikes
    join: float  # what the others wait for when one comes back
    away: float  # from a death until that replica is at work again
    full: float  # a step of all
    less: float  # a step with one away

    def missing(self, steps: float) -> float:
        """Replicas that are away, on average: a failure every so many steps takes one away for `away` seconds."""
        low, high = 0.0, float(self.replicas)
        for _ in range(
            60
        ):  # the more are missing, the longer a step takes, and the rarer failures by the clock
            middle = (low + high) / 2
            low, high = (middle, high) if self.away / self._between(steps, middle) > middle else (low, middle)
        return low

    def ours(self, steps: float) -> float:
        """Seconds from one failure to the next."""
        return self._between(steps, self.missing(steps))

    def wall_ratio(self, steps: float) -> float:
        """How many times more tokens an hour than checkpoint-restart at its best."""
        return self.baseline.between_failures(steps, self.baseline.best_interval(steps)) / self.ours(steps)

    @property
    def calm_ratio(self) -> float:
        """The same where nothing ever fails: what the protection costs."""
        return self.baseline.step / self.full

    def steps_between(self, share: float) -> float:
        return self.baseline.stall / (share * self.baseline.step)

    def crossing(self) -> float | None:
        """The stall of a restart below which failures cost us more than them, as a share of the time of the steps
        between; None: they never do, and what is left is the calm ratio."""
        shares = [10 ** (exponent / 10) for exponent in range(-40, 11)]
        worse = [share for share in shares if self.wall_ratio(self.steps_between(share)) < self.calm_ratio]
        return max(worse, default=None)

    def _between(self, steps: float, missing: float) -> float:
        step = self.full + min(missing, 1.0) * (self.less - self.full)
        if missing > 1:
            step *= (self.replicas - 1) / max(self.replicas - missing, 1e-9)
        return steps * step + self.recovery + self.join

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def rerun_steps(kills: Sequence[int], every: int) -> float:
    """Steps that are run again after a failure, the one that failed included; the mean over these failures."""
    return sum(step - (step - 1) // every * every for step in kills) / len(kills)
