"""Watchdogs: when a rank that is not known to be dead must be treated as dead.

**Forgotten.** Open MPI's agreement was seen to lose its result on one survivor: the others hold it
and are in the next agreement already, which then waits for the forgotten rank for ever. Once a rank
holds the result of an agreement, all others get it within milliseconds; a rank that still waits
seconds later has been forgotten. It ends itself, which makes it an ordinary death.

**Hung.** A process that is stopped, or stuck in the kernel, is not dead to Open MPI, and all wait
for it. Two cases differ. *Stopped*: its heartbeat stands still, and the kernel says that it was
stopped. That is proof, and a short limit is enough. *Stuck*: it is inside the step that others have
come to vote on, and neither finishes a microbatch nor votes. That is no proof: a sample may be
large, a file system may stall, a call may hold Python's lock (and with it the heartbeat). So the
limit is long, and half of the replicas or more are never killed. A rank that hangs is killed by
ranks of its host, so it can never wake up and write, and it becomes an ordinary death, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from recover.job.grid import Grid
from recover.world.liveness.signs import Sign, Suspects

FORGOTTEN_AFTER = 3.0  # seconds
STOPPED = 10.0  # seconds that a process may be stopped while others wait for it
STUCK = 60.0  # seconds without progress inside a step, or FACTOR times a typical step if that is longer
FACTOR = 10.0
LAST_STEPS = 64
SUSPECT = 0.25  # of the limit: a rank without progress for so long looks stuck
PATIENCE = 6.0  # times the limit, for a rank that computes a slot over which a replica was lost already
ASLEEP = (
    1.0  # seconds; a watchdog that was not called for so long was suspended itself, maybe with its machine
)
HUSHED = 1.0  # seconds; a rank without a heartbeat for so long may hold up an agreement


class AgreementWatchdog:
    """Judges from the progress board whether an agreement has forgotten this rank."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._agreement = 0
        self._looked = float("-inf")

    def forgotten(self, waiting_in: int | None, held: bool, now: float) -> bool:
        """Whether the agreement has forgotten this rank. `waiting_in`: the agreement this rank
        waits in, if any; `held`: a living rank holds its result already."""
        asleep, self._looked = now - self._looked > ASLEEP, now
        if waiting_in is None or not held:
            self._since = None
            return False
        if self._since is None or self._agreement != waiting_in or asleep:
            self._since, self._agreement = now, waiting_in
        return now - self._since > FORGOTTEN_AFTER


class HangWatchdog:
    """Judges from the signs of life of all ranks of this host which of them hang.

    Time counts only while this rank waits.

    `blamed(step)`: the slots of this step over which a replica was lost already.
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
        self._warm = False  # the first step is complete; it may compile without a limit
        self.stuck_limit = self._stuck
        # Ranks without a sign of life at the moment: an agreement may not end because of them.
        self.hushed: list[int] = []
        self._looked = float("-inf")
        self._signs: dict[int, Sign] = {}
        self._heard: dict[int, float] = {}
        self._ran: dict[int, float] = {}
        self._moved: dict[int, float] = {}
        self._many = float("-inf")  # when half of the replicas or more last looked stuck
        self._tell_after = 0.0  # seconds of waiting

    def committed(self, seconds: float) -> None:
        """A step without a loss was committed after `seconds`."""
        if self._warm:
            self._steps.append(seconds)
            self.stuck_limit = max(self._stuck, FACTOR * _middle(self._steps))
        self._warm = True

    def look(self, waiting: bool, signs: Mapping[int, Sign], now: float) -> dict[int, str]:
        """The ranks that hang, and why.

        `waiting`: this rank is in a reduction, an agreement or a repair.
        """
        if not waiting or now - self._looked > self._asleep:
            self._signs = {}  # count from zero
        self._looked = now
        for rank, sign in signs.items():
            before = self._signs.get(rank)
            beats = before is None or before.heartbeat != sign.heartbeat
            if beats:
                self._heard[rank] = now
            if beats or not sign.stopped:
                self._ran[rank] = now
        # A rank that waits for a silent one, inside an agreement or a reduction, is not stuck
        # itself.
        self.hushed = [rank for rank in signs if now - self._heard[rank] > HUSHED]
        for rank, sign in signs.items():
            before = self._signs.get(rank)
            # A stopped rank continues, or is fenced by the other limit.
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
        # Replicas are counted, not ranks: the other ranks of a stuck rank's replica look stuck,
        # too. A cause that holds up half of the replicas is outside of them. A joining replica
        # computes nothing, so it does not count as evidence.
        judges = {rank for rank, sign in signs.items() if rank < self._grid.ranks or sign.holds_state}
        if 2 * len(self._grid.replicas_of(judges & idle.keys())) >= len(self._grid.replicas_of(judges)):
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
        """Report the ranks that are waited for: once, and then at growing intervals."""
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
