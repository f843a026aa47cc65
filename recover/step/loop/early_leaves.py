"""Steps that the user's loop leaves before they are complete, by a `break` or an exception."""

from __future__ import annotations

# How often in a row, without getting further, a step may be left between two microbatches (by a
# `break`), and inside of one (mostly by an exception that the user's loop catches to try again).
BETWEEN, INSIDE = 2, 8


class EarlyLeaves:
    """Counts how often in a row the same step was left. A loop that always leaves it at the same
    microbatch would never end."""

    def __init__(self) -> None:
        self._step = self._times = self._furthest = 0
        self._limit = INSIDE

    def left(self, step: int, computed: int, is_inside: bool) -> None:
        """Step `step` was left after `computed` microbatches; `is_inside`: one more was handed out,
        and its backward had not run."""
        goes_on = step == self._step and computed <= self._furthest
        self._times = self._times + 1 if goes_on else 1
        self._furthest = max(computed, self._furthest) if step == self._step else computed
        self._step, self._limit = step, INSIDE if is_inside else BETWEEN

    def refuse_another(self, step: int) -> None:
        """Raise if the step that begins was left too often."""
        if step != self._step or self._times < self._limit:
            return
        raise RuntimeError(
            f"step {step} was left before it was complete, {self._times} times in a row and each time after at most "
            f"{self._furthest} microbatch(es), so it would never be committed; let the loop over step.microbatches "
            "run to its end (leave the `break` out: it ends when the step is committed), and end training between "
            "two steps, by `while step.index < N` or step.request_stop()"
        )
