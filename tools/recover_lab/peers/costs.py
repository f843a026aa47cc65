"""Cost of failures at rates that were not measured: arithmetic on measured parts.

The baseline, from one failure to the next, with F steps between them and a checkpoint every N:

    F steps + F/N saves + one stall (failure handling, restart, load) + the steps since the last checkpoint, mostly N/2

Ours: F steps by the survivors + one recovery. Which of the two is better depends on one ratio: the stall against the
time between failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# The production system that the paper cites: a failure every 18 minutes, 10 of them without progress.
PRODUCTION_LOST, PRODUCTION_PROGRESS = 10.0, 8.0
# Times more per living rank, and tokens at equal GPU-hours.
PAPER = {"2.23 times": 2.23, "+74.9%": 1.749, "+47.4%": 1.474}


@dataclass(frozen=True)
class RestartCosts:
    """Seconds of checkpoint-restart, the baseline."""

    step: float
    save: float  # the part of a save that training waits for
    stall: float  # from a failure until training continues

    def between_failures(self, steps: float, every: float, rerun: float | None = None) -> float:
        """Seconds from one failure to the next; by default half a checkpoint interval is run again."""
        lost = every / 2 if rerun is None else rerun
        return (steps + lost) * self.step + steps / every * self.save + self.stall

    def best_interval(self, steps: float, kills: Sequence[int] = ()) -> int:
        """Steps between checkpoints at which the baseline loses least; `kills`: to failures in exactly these steps."""
        return min(
            range(1, max(1, int(steps)) + 1),
            key=lambda every: self.between_failures(
                steps, every, rerun_steps(kills, every) if kills else None
            ),
        )

    def production(self) -> int:
        """Steps between failures at which this baseline, at its best, progresses as little as the production system."""
        steps = 1.0
        for _ in range(20):  # the checkpoint interval depends on the failures, and the rerun steps on it
            lost = self.between_failures(steps, self.best_interval(steps)) - steps * self.step
            steps = lost / PRODUCTION_LOST * PRODUCTION_PROGRESS / self.step
        return max(2, 2 * round(steps / 2))  # even: the first failure strikes after one and a half intervals


@dataclass(frozen=True)
class Costs:
    """Both systems, measured under the same failures."""

    replicas: int
    baseline: RestartCosts
    recovery: float  # ours: seconds that a failure adds to its step
    steps_of: dict[int, float]  # ours: seconds of a step, by replicas alive

    def ours(self, steps: float, alive: int) -> float:
        """Seconds from one failure to the next."""
        return steps * self.steps_of[alive] + self.recovery

    def wall_ratio(
        self, steps: float, alive: int, every: int | None = None, rerun: float | None = None
    ) -> float:
        """How many times faster ours is: the baseline restarts at full size, ours continues with fewer replicas."""
        every = every or self.baseline.best_interval(steps)
        return self.baseline.between_failures(steps, every, rerun) / self.ours(steps, alive)

    def effective_ratio(
        self, steps: float, alive: int, every: int | None = None, rerun: float | None = None
    ) -> float:
        """`wall_ratio` per living rank: the paper's metric."""
        return self.wall_ratio(steps, alive, every, rerun) * self.replicas / alive

    def share(self, steps: float) -> float:
        """The stall as a share of the time of so many steps."""
        return self.baseline.stall / (steps * self.baseline.step)

    def steps_between(self, share: float) -> float:
        """Steps between failures at which the stall is this share of their time."""
        return self.baseline.stall / (share * self.baseline.step)

    def crossing(self, alive: int, per_living_rank: bool, level: float = 1.0) -> float | None:
        """The stall above which ours is `level` times better, as a share of the time of the steps between failures.

        None if ours is better at every rate, within the few percent by which two runs differ.
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
    """Both systems, where our lost replicas rejoin. Seconds, measured under the same failures."""

    replicas: int
    baseline: RestartCosts
    recovery: float  # ours: added by a failure to its step
    join: float  # wait of the others when a replica joins
    away: float  # from a death until that replica is in a step again
    full: float  # a step of all replicas
    less: float  # a step with one replica missing

    def missing(self, steps: float) -> float:
        """Mean number of missing replicas: a failure every `steps` steps removes one for `away` seconds."""
        low, high = 0.0, float(self.replicas)
        for _ in range(60):  # more missing replicas make steps longer, and failures rarer by the clock
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
        """`wall_ratio` without failures: the overhead."""
        return self.baseline.step / self.full

    def steps_between(self, share: float) -> float:
        return self.baseline.stall / (share * self.baseline.step)

    def crossing(self) -> float | None:
        """The stall of a restart below which failures cost ours more, as a share of the time of the steps between.

        None if they never do: then ours is never below the ratio without failures.
        """
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
    """Steps that are run again after a failure, with the failed one; the mean over these failures."""
    return sum(step - (step - 1) // every * every for step in kills) / len(kills)
