"""Skipped steps: committed steps that did not call the optimizer, because the gradient was not
finite or no microbatch had a weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from recover.step.errors import SkippedStepsError
from recover.step.position import is_whole
from recover.step.result import StepResult
from recover.world import rank_exit
from recover.world.world import World

SKIP_LIMIT = 50
SHOWN = 8  # samples in a message


class SkippedSteps:
    """Reports the first skipped step of a run, and ends a run that skips too many in a row. The
    same on all replicas; a joining replica receives the count.

    limit:  skipped steps in a row after which the run ends; 0 or None: never
    """

    def __init__(self, world: World, limit: int | None) -> None:
        if limit is not None and (not is_whole(limit) or limit < 0):
            raise ValueError(
                f"skip_limit is {limit!r}; give a whole number of steps, or 0 for a run that never ends because of them"
            )
        self._world, self._limit = world, int(limit or 0)
        self._in_a_row = 0
        self._first = ""  # the first of them: its number, the reason, its samples
        self._has_reported = False

    def committed(self, number: int, result: StepResult, not_finite: Sequence[int]) -> None:
        """Count a committed step if it was skipped; `not_finite`: its samples whose loss is not finite."""
        if not result.skipped:
            self._in_a_row, self._first = 0, ""
            return
        self._in_a_row += 1
        if self._in_a_row == 1:
            self._first = f"step {number} was skipped: {_reason(result, not_finite)}"
        if not self._has_reported:
            self._has_reported = True
            end = f", and {self._limit} in a row end the run (skip_limit)" if self._limit else ""
            text = (
                f"{self._first}; parameters and optimizer are as before it. Later skipped steps are counted "
                f"(step.skipped, `recover status`){end}"
            )
            rank_exit.report(text, self._world.rank == min(self._world.members))

    def refuse_too_many(self, number: int) -> None:
        """Raise SkippedStepsError on all replicas after the last of too many skipped steps."""
        if not self._limit or self._in_a_row < self._limit:
            return
        self._world.linger()
        raise SkippedStepsError(
            f"{self._in_a_row} steps in a row were skipped, the last is step {number} (skip_limit={self._limit}). The "
            f"first: {self._first}. Look at these samples, lower the learning rate or clip the gradient, and resume "
            "from a checkpoint before that step; skip_limit=0 lets a run go on"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self._in_a_row, "first": self._first, "has_reported": self._has_reported}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._in_a_row, self._first = state["in_a_row"], state["first"]
        self._has_reported = state["has_reported"]


def _reason(result: StepResult, not_finite: Sequence[int]) -> str:
    if not result.weight:
        return (
            "the weights of all its microbatches are 0, so there is nothing to take the mean over, and its loss is "
            f"NaN ({_named(result.all_samples)})"
        )
    if not_finite:
        return f"the loss of {_named(not_finite)} is not finite"
    if not math.isfinite(result.loss):
        return f"its loss is {result.loss} ({_named(result.all_samples)})"
    return f"its loss is {result.loss:.6g}, and its gradient is not finite ({_named(result.all_samples)})"


def _named(samples: Sequence[int]) -> str:
    shown = ", ".join(map(str, samples[:SHOWN]))
    more = f", ... of {len(samples)}" if len(samples) > SHOWN else ""
    return f"sample{'' if len(samples) == 1 else 's'} {shown}{more}"
