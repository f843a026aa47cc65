"""When a rank that nobody knows to be dead must be taken for dead.

**Forgotten.** Open MPI's agreement was seen to lose its result on one survivor: the others hold it and are in the
next agreement already, which then waits for the forgotten one for ever. Once anybody holds the result of an
agreement, all others get it within milliseconds; whoever still waits seconds later has been forgotten. It takes itself
out, and becomes an ordinary death.

**Hung.** A process that is stopped, or stuck in a kernel, is not dead to Open MPI, and all wait for it. Two signs
tell it from one that computes for long. Its heartbeat: the watcher thread of every rank ticks, whatever the main thread
computes; a process that is stopped does not. And its progress: a rank that ticks, but neither finishes a microbatch nor
comes to the vote on a step while the others wait there for many times as long as steps have taken, is stuck. Who hangs
is killed by its host's peers, so it can never come back and write, and it becomes an ordinary death, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

FORGOTTEN_AFTER = 3.0  # seconds
SILENT = (
    10.0  # seconds without a heartbeat; a call may hold Python's lock, and with it the watcher, for a while
)
STUCK = 60.0  # seconds without progress inside a step, or so many times the longest of the last steps
FACTOR = 10.0
LAST_STEPS = 64
PATIENCE = 6  # times as long, at most a minute, before the first step
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


@dataclass(frozen=True)
class Sign:
    """What a rank shows of itself on the board."""

    heartbeat: int
    progress: tuple[int, ...]
    late: bool  # it is in the step that this rank is in, and this rank has voted and it has not


class HangWatchdog:
    """Fed with the others' signs of life; says who hangs. Times count only while this rank waits for others."""

    def __init__(self, limit: float | None = None) -> None:
        self._silent, self._stuck = (SILENT, STUCK) if limit is None else (limit, limit)
        self._steps: deque[float] = deque(maxlen=LAST_STEPS)
        # Who shows no sign of life just now: an agreement may not end because of it.
        self.hushed: list[int] = []
        self._looked = float("-inf")
        self._signs: dict[int, Sign] = {}
        self._heard: dict[int, float] = {}
        self._moved: dict[int, float] = {}

    def committed(self, seconds: float) -> None:
        """A step in which nobody was lost was committed, so long after it began."""
        self._steps.append(seconds)

    @property
    def silent_limit(self) -> float:
        """Before the first step ranks start up, with calls that hold Python's lock for long: more patience then."""
        return self._silent if self._steps else max(self._silent, min(STUCK, PATIENCE * self._silent))

    @property
    def stuck_limit(self) -> float:
        return max(self._stuck, FACTOR * max(self._steps, default=0.0))

    def look(self, waiting: bool, signs: Mapping[int, Sign], now: float) -> dict[int, str]:
        """Who hangs, and what shows it. `waiting`: this rank is in a reduction, an agreement or a repair."""
        if not waiting or now - self._looked > ASLEEP:
            self._signs = {}  # start counting anew
        self._looked = now
        hung = {}
        for rank, sign in signs.items():
            before = self._signs.get(rank)
            if before is None or before.heartbeat != sign.heartbeat:
                self._heard[rank] = now
        # Who waits, deep inside an agreement or a reduction, for one that has stopped is not itself stuck.
        self.hushed = [rank for rank in signs if now - self._heard[rank] > HUSHED]
        for rank, sign in signs.items():
            before = self._signs.get(rank)
            if before is None or before.progress != sign.progress or not sign.late or self.hushed:
                self._moved[rank] = now
            silence = now - self._heard[rank]
            if silence > self.silent_limit:
                hung[rank] = f"its process has not run for {self.silent_limit:g} s"
            elif self._steps and now - self._moved[rank] > self.stuck_limit:
                hung[rank] = f"it runs, but has done nothing for {self.stuck_limit:g} s, and all wait for it"
        self._signs = dict(signs)
        return hung
