"""Time of a user's script between the commits of two steps, by what it was spent on, as far as this rank can see.

Steps measure themselves. Between them the script saves, evaluates or does anything else; what the library cannot name
is time outside of steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from recover.world.world import World

Spent = Literal["checkpoint_ms", "evaluation_ms", "outside_ms"]  # fields of `StepRecord`


class ScriptTime:
    """All time since the last commit is attributed once: every call attributes the time since the call
    before. Time before the first commit is start-up, and not counted here."""

    def __init__(self, world: World, clock: Callable[[], float] = time.perf_counter) -> None:
        self._world, self._clock = world, clock
        self._spent: dict[Spent, float] = {}  # seconds
        self._since: float | None = None  # all time before it is attributed; None before the first commit
        self._epoch = 0  # of the world at `_since`
        self._steps = 0  # steps in progress: a loop over microbatches may contain a step of another Step
        self._through: float | None = None  # when the last backward of the loop returned
        self._in_loop = 0.0  # seconds of the script between a backward and the next microbatch

    def begin_step(self) -> None:
        self._attribute("outside_ms")
        self._steps += 1
        self._through, self._in_loop = None, 0.0

    def leave_step(self) -> None:
        """The step in progress was left: what was run in it does not count."""
        self._steps -= 1
        self._attribute("outside_ms")

    def commit_step(self) -> dict[Spent, float]:
        """The step in progress is committed. Returns the milliseconds since the commit before."""
        self._steps -= 1
        spent, self._spent = self._spent, {}
        spent["outside_ms"] = spent.get("outside_ms", 0.0) + self._in_loop
        return {name: shown for name, seconds in spent.items() if (shown := round(1e3 * seconds, 3)) > 0}

    def recorded(self) -> None:
        """The committed step is recorded: the time of the script begins."""
        self._since, self._epoch = self._clock(), self._world.epoch

    def backward_done(self) -> None:
        """A backward has returned to the script, and no device computes any more."""
        self._through = self._clock()

    def next_microbatch(self) -> None:
        """The script asks for the next microbatch, or for the end of the step."""
        if self._through is not None:
            self._in_loop += self._clock() - self._through
        self._through = None

    @contextmanager
    def spending(self, name: Spent) -> Iterator[None]:
        """A context around a call of the library between two steps."""
        self._attribute("outside_ms")
        try:
            yield
        finally:
            self._attribute(name)

    def evaluated(self) -> None:
        """A held-out loss was recorded: the time since the last commit, or the last of these calls, was spent on it."""
        self._attribute("evaluation_ms")

    def _attribute(self, name: Spent) -> None:
        if self._since is None or self._steps:
            return
        before, epoch = self._since, self._epoch
        self.recorded()
        seconds = self._since - before
        if self._epoch != epoch:
            seconds -= self._world.last_census.seconds  # a repair, which an incident records
        self._spent[name] = self._spent.get(name, 0.0) + max(0.0, seconds)
