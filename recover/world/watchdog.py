"""When a rank that nobody knows to be dead must be taken for dead.

**Forgotten.** Open MPI's agreement was seen to lose its result on one survivor: the others hold it and are in the
next agreement already, which then waits for the forgotten one for ever. Once anybody holds the result of an
agreement, all others get it within milliseconds; whoever still waits seconds later has been forgotten. It takes itself
out, and becomes an ordinary death.

**Hung.** A process that is stopped, or stuck in a kernel, is not dead to Open MPI, and all wait for it. Two things are
told apart. One that is *stopped*: its heartbeat stands still, and the kernel says that it was stopped. That is proof,
and a short limit is enough. One that is *stuck*: it is inside the step that others have come to vote on, and neither
finishes a microbatch nor comes. That is no proof: a sample may be large, a file system may stall, a call may hold
Python's lock (and with it the heartbeat). So the limit is long, and the many are never killed for the few. Who hangs is
killed by its host's peers, so it can never come back and write, and it becomes an ordinary death, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from recover.job.grid import Grid
from recover.world.liveness.signs import Sign, Suspects

FORGOTTEN_AFTER = 3.0  # seconds
STOPPED = 10.0  # seconds that a process may be stopped while others wait for it
STUCK = 60.0  # seconds without progress inside a step, or so many times a typical step
FACTOR = 10.0
LAST_STEPS = 64
SUSPECT = 0.25  # of the limit: who has done nothing for so long counts among those that look stuck
PATIENCE = 6.0  # times as long for whoever computes a slot that has cost a replica already
ASLEEP = 1.0  # a watcher that was not called for so long has slept itself: the whole machine may have
HUSHED = 1.0  # a rank without a heartbeat for so long may be the reason why an agreement does not end


class AgreementWatchdog:
    """Fed with what the progress board shows; says when this rank has been forgotten."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._agreement = 0
        self._looked = float("-inf")

    def forgotten(self, waiting_in: int | None, held: bool, now: float) -> bool:
        """`waiting_in`: the agreement this rank waits in, if any; `held`: a living rank holds its result already."""
        asleep, self._looked = now - self._looked > ASLEEP, now
        if waiting_in is None or not held:
            self._since = None
            return False
        if self._since is None or self._agreement != waiting_in or asleep:
            self._since, self._agreement = now, waiting_in
        return now - self._since > FORGOTTEN_AFTER


class HangWatchdog:
    """Fed with the signs of life of all ranks of this host; says who hangs. Times count only while this rank waits.

    `blamed(step)`: the slots of this step that have cost a replica already.
    """

    def __init__(
        self,
        grid: Grid,
        limit: float | None = None,
        blamed: Callable[[int], frozenset[tuple[int, int]]] = lambda step: frozenset(),
        report: Callable[[str], None] = lambda text: None,
        asleep: float = ASLEEP,
    ) -> None:
        self._grid, self._blamed, self._report, self._asleep = grid, blamed, report, asleep
        self.stopped_limit, self._stuck = (STOPPED, STUCK) if limit is None else (limit, limit)
        self._steps: deque[float] = deque(maxlen=LAST_STEPS)
        self._warm = False  # the first step is through: it may compile for as long as it likes
        self.stuck_limit = self._stuck
        # Who shows no sign of life just now: an agreement may not end because of it.
        self.hushed: list[int] = []
        self._looked = float("-inf")
        self._signs: dict[int, Sign] = {}
        self._heard: dict[int, float] = {}
        self._ran: dict[int, float] = {}
        self._moved: dict[int, float] = {}
        self._many = float("-inf")  # when half of the replicas, or more, last looked stuck
        self._tell_after = 0.0  # seconds of waiting

    def committed(self, seconds: float) -> None:
        """A step in which nobody was lost was committed, so long after it began."""
        if self._warm:
            self._steps.append(seconds)
            self.stuck_limit = max(self._stuck, FACTOR * _middle(self._steps))
        self._warm = True

    def look(self, waiting: bool, signs: Mapping[int, Sign], now: float) -> dict[int, str]:
        """Who hangs, and what shows it. `waiting`: this rank is in a reduction, an agreement or a repair."""
        if not waiting or now - self._looked > self._asleep:
            self._signs = {}  # start counting anew
        self._looked = now
        for rank, sign in signs.items():
            before = self._signs.get(rank)
            beats = before is None or before.heartbeat != sign.heartbeat
            if beats:
                self._heard[rank] = now
            if beats or not sign.stopped:
                self._ran[rank] = now
        # Who waits, deep inside an agreement or a reduction, for one that is silent is not itself stuck.
        self.hushed = [rank for rank in signs if now - self._heard[rank] > HUSHED]
        for rank, sign in signs.items():
            before = self._signs.get(rank)
            # One that was stopped is on its way again, or dies of a fence.
            excused = not sign.late or sign.stopped or bool(self.hushed and rank not in self.hushed)
            if before is None or before.progress != sign.progress or excused:
                self._moved[rank] = now
        self._signs = dict(signs)
        hung = {
            rank: f"its process has been stopped for {self.stopped_limit:g} s"
            for rank, sign in signs.items()
            if sign.stopped and now - self._ran[rank] > self.stopped_limit
        }
        return hung | (self._look_for_stuck(signs, now) if self._warm else {})

    def _look_for_stuck(self, signs: Mapping[int, Sign], now: float) -> dict[int, str]:
        idle = {
            rank: now - self._moved[rank]
            for rank, sign in signs.items()
            if now - self._moved[rank] > SUSPECT * self.stuck_limit
        }
        if not idle:
            self._tell_after = self.stuck_limit
            return {}
        # By replicas: the mates of a stuck rank look stuck, too. What holds up half of them is not their fault.
        if 2 * len(self._grid.replicas_of(idle)) >= len(self._grid.replicas_of(signs)):
            self._many = now
            self._tell(idle, signs)
            return {}
        hung = {}
        for rank, seconds in idle.items():
            limit, alone = self.stuck_limit, min(seconds, now - self._many)
            if alone > limit and not self._blamed(signs[rank].step).isdisjoint(signs[rank].suspects):
                limit *= PATIENCE
            if alone > limit:
                hung[rank] = f"it runs, but has done nothing for {limit:g} s, and all wait for it"
        return hung

    def _tell(self, idle: Mapping[int, float], signs: Mapping[int, Sign]) -> None:
        """What is being waited for: once, and then at growing intervals."""
        if max(idle.values()) < self._tell_after:
            return
        self._tell_after = 2 * max(idle.values())
        stuck = "; ".join(
            f"rank {rank} for {seconds:.0f} s{describe(signs[rank].step, signs[rank].suspects)}"
            for rank, seconds in sorted(idle.items())
        )
        self._report(
            f"waiting for {len(self._grid.replicas_of(idle))} of {len(self._grid.replicas_of(signs))} replicas, too "
            f"many to be at fault themselves, so nobody is killed: {stuck}"
        )


def describe(step: int, suspects: Suspects) -> str:
    """` in step 6, slot 3 (sample 43)`"""
    slots = ", ".join(f"slot {slot} (sample {sample})" for slot, sample in suspects)
    return f" in step {step}" + (f", {slots}" if slots else "")


def _middle(values: Iterable[float]) -> float:
    """The median, or the larger of the two in the middle."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
