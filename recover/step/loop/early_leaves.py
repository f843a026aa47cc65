"""Steps that the user's loop leaves before they are complete, by a `break` or an exception."""

from __future__ import annotations

# How often in a row, without getting further, a step may be left between two microbatches (by a
# `break`), and inside of one (mostly by an exception that the user's loop catches to try again).
BETWEEN, INSIDE = 2, 8


class EarlyLeaves:
    """Counts how often in a row the same step was left. A loop that always leaves it at the same
    microbatch would never end."""

    def __init__(self) -> None:
        self._step = self._furthest = self._refused = 0
        self._times = {BETWEEN: 0, INSIDE: 0}

    def left(self, step: int, computed: int, is_inside: bool) -> None:
        """Note that `step` was left after `computed` microbatches; `is_inside`: one more was handed out,
        and its backward had not run."""
        if step != self._step or computed > self._furthest:
            self._step, self._furthest = step, computed
            self._times = {BETWEEN: 0, INSIDE: 0}
        self._times[INSIDE if is_inside else BETWEEN] += 1

    def refuse_another(self, step: int) -> None:
        """Raise if the step that begins was left too often. The second time for the same step it raises
        SystemExit, which a loop that catches exceptions to try again does not catch."""
        if step != self._step or all(times < limit for limit, times in self._times.items()):
            return
        kind = SystemExit if self._refused == step else RuntimeError
        self._refused = step
        times = sum(self._times.values())
        raise kind(
            f"step {step} was left before it was complete, {times} times in a row and each time after at most "
            f"{self._furthest} microbatch(es), so it would never be committed; let the loop over step.microbatches "
            "run to its end (leave the `break` out: it ends when the step is committed), and end training between "
            "two steps, by `while step.index < N` or step.request_stop()"
        )
