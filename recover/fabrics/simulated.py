"""The simulated fabric: many virtual ranks in one process, under a deterministic scheduler.

The same protocol code as over Open MPI runs here, one greenlet per rank; at every call the scheduler picks, from
a seed, who runs next and who dies. It is as unkind as the real thing was measured to be: a rank's own list of
deaths lags; an agreement that meets an unacknowledged death fails everywhere and drops its word; it may succeed
although somebody has not heard of a death, and count in one who has died since; it may forget to tell one rank; if
all who held its result have died, the others may decide it anew; a reduction hit by a death succeeds on some and
fails on others; messages of the dying may be lost; the carriers of a rank may fail, for a while or for ever.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import greenlet
import numpy as np

from recover.fabrics.base import Admission, NotAdmittedError
from recover.job.grid import Grid
from recover.liveness.board import COLUMNS, PID, Board

TICK = 0.0002  # virtual seconds per scheduling decision
LOOKS = 0.15  # of the watchers look around between two of them


class HangError(Exception):
    """Living ranks wait for something that can never happen."""


class Died(greenlet.GreenletExit):
    """Unwinds the greenlet of a rank that dies."""


class _Agreement:
    def __init__(self) -> None:
        self.words: dict[int, int] = {}
        self.resolved = False
        self.result: int | None = None
        self.forgets: int | None = None
        self.holders: set[int] = set()  # who has the result


class Simulation:
    """`programs` get their fabric and run to the end or die. `kills`: after how many calls a rank dies; `stops`: ... is
    stopped, for ever.

    `sick`: from which to which try a rank's carrier fails, and whether it can be made then, or only not be built.
    """

    def __init__(
        self,
        grid: Grid,
        seed: int,
        kills: Mapping[int, int] | None = None,
        stalls: int = 0,
        limit: int = 60_000,
        sick: Mapping[int, tuple[int, int, bool]] | None = None,
        stops: Mapping[int, int] | None = None,
    ) -> None:
        self.grid = grid
        self.rng = random.Random(seed)
        self.clock = 0.0
        self.fabrics = [SimulatedFabric(self, rank) for rank in range(grid.ranks)]
        self.dead: dict[int, str] = {}
        self.finished: dict[int, Any] = {}
        self.mail: dict[tuple[int, int, int], bytes] = {}
        self.agreements: dict[int, _Agreement] = {}
        self.reductions: dict[object, Any] = {}  # parts of operations under way, by whoever brings them
        self.revoked: set[object] = set()
        self.board = SimulatedBoard(self)
        self.watchers: dict[int, Callable[[float], None]] = {}  # by rank: one look around
        self.stopped: set[int] = set()  # by a signal, as it were: they neither run nor die
        self._kills, self._stops = dict(kills or {}), dict(stops or {})
        self._stalls = stalls
        self._limit = limit
        self.sick = dict(sick or {})
        self.reluctant = False  # for programs: who is left out does not leave by itself ...
        self.leaving: set[int] = set()  # ... but stays as long as there are others
        self._notices: list[tuple[float, int, int]] = []  # (when, whom, who died)
        self._scheduler = greenlet.getcurrent()

    def run(self, program: Callable[[SimulatedFabric], Any]) -> dict[int, Any]:
        """Run the program on every rank; what each survivor returned. Raises HangError."""
        for fabric in self.fabrics:
            fabric.task = greenlet.greenlet(self._guard(program, fabric))
        while self._anybody_can_go_on():
            self._limit -= 1
            if self._limit < 0:
                raise HangError(f"no end in sight at {self.clock:.3f} s: {self._picture()}")
            self._deliver()
            self._watch(LOOKS)
            ready = self._ready()
            if not ready:
                self._watch(1.0)
                if not self._ready():
                    self._skip_ahead()
                continue
            self.clock += TICK
            self.rng.choice(ready).task.switch()
        # The dead are still somewhere in their programs, and keep what they saw: a thousand runs would fill the memory.
        self.reductions.clear()
        self.agreements.clear()
        return self.finished

    def _guard(
        self, program: Callable[[SimulatedFabric], Any], fabric: SimulatedFabric
    ) -> Callable[[], None]:
        def body() -> None:
            try:
                result = program(fabric)
            except Died:
                return
            if fabric.alive:
                self.finished[fabric.rank] = result
                self._tell_of(fabric.rank)  # who leaves without MPI_Finalize is taken for dead

        return body

    def kill(self, rank: int, why: str) -> None:
        """`rank` dies now. The others will hear of it, each in its own time."""
        if rank in self.dead or rank in self.finished:
            return
        self.dead[rank] = why
        self._tell_of(rank)
        for key in [key for key in self.mail if key[0] == rank]:
            if self.rng.random() < 0.5:
                del self.mail[key]

    def _tell_of(self, rank: int) -> None:
        for fabric in self.fabrics:
            late = self.rng.choice((0.0, 0.0005, 0.002, 0.01, 0.03)) * self.rng.random()
            self._notices.append((self.clock + late, fabric.rank, rank))

    @property
    def staying(self) -> set[int]:
        return {fabric.rank for fabric in self.fabrics if fabric.alive} - self.leaving

    @property
    def gone(self) -> set[int]:
        return {*self.dead, *self.finished}

    def count_call(self, rank: int) -> None:
        """Every call may be the last one."""
        for schedule, strike in ((self._kills, self._strike_dead), (self._stops, self.stopped.add)):
            left = schedule.get(rank)
            if left is not None:
                schedule[rank] = left - 1
                if left == 0:
                    strike(rank)

    def kill_at_next_call(self, rank: int) -> None:
        self._kills[rank] = 0

    def _strike_dead(self, rank: int) -> None:
        self.kill(rank, "killed")
        raise Died

    def switch(self) -> None:
        self._scheduler.switch()

    def resolve(self, number: int) -> _Agreement:
        """Decide an agreement once nobody alive is missing any more."""
        agreement = self.agreements.setdefault(number, _Agreement())
        gone = self.gone
        if agreement.holders and agreement.holders <= gone:
            # Those who had the result have taken it with them: the others may have to decide anew.
            agreement.holders, agreement.forgets = set(), None
            if self.rng.random() < 0.5:
                agreement.resolved, agreement.result = False, None
        alive = [f for f in self.fabrics if f.alive]
        if agreement.resolved or any(f.rank not in agreement.words for f in alive):
            return agreement
        agreement.resolved = True
        counted = {f.rank for f in alive}
        success = True
        for dead in sorted(gone):
            if dead in agreement.words and self.rng.random() < 0.5:
                counted.add(dead)
                continue
            knowers = [f for f in alive if dead in f.known]
            if not knowers:  # the agreement itself runs into the death; somebody learns of it
                for fabric in self.rng.sample(alive, self.rng.randint(1, len(alive))):
                    fabric.known.append(dead)
                success = False
            elif any(dead not in f.acknowledged for f in knowers):
                success = False
        if success:
            agreement.result = -1
            for rank in counted:
                agreement.result &= agreement.words[rank]
        if self._stalls and len(alive) > 1 and self.rng.random() < 0.1:
            self._stalls -= 1
            agreement.forgets = self.rng.choice(alive).rank
        return agreement

    def _deliver(self) -> None:
        due = [notice for notice in self._notices if notice[0] <= self.clock]
        if due:
            self._notices = [notice for notice in self._notices if notice[0] > self.clock]
            for _, whom, who in due:
                if who not in self.fabrics[whom].known:
                    self.fabrics[whom].known.append(who)

    def _ready(self) -> list[SimulatedFabric]:
        return [f for f in self.fabrics if f.alive and f.rank not in self.stopped and f.ready()]

    def _anybody_can_go_on(self) -> bool:
        """Whether a rank lives whose replica has nobody stopped: of one that is alone nobody would fence it."""
        held_up = set(self.grid.replicas_of(self.stopped - self.gone)) if self.stopped else ()
        return any(f.alive and self.grid.replica(f.rank) not in held_up for f in self.fabrics)

    def _watch(self, share: float) -> None:
        """Every rank that runs has a watcher, which looks around now and then: this share of them just now."""
        for rank, look in self.watchers.items():
            if self.fabrics[rank].alive and rank not in self.stopped and self.rng.random() < share:
                self.board.beat(rank)
                try:
                    look(self.clock)
                except Died:
                    pass  # it found that its own rank must go

    def _skip_ahead(self) -> None:
        """Nobody can run: on to the next moment at which something happens by itself."""
        moments = [when for when, _, _ in self._notices]
        moments += [f.asleep_until for f in self.fabrics if f.alive and f.asleep_until > self.clock]
        forgotten = [f for f in self.fabrics if f.alive and f.waiting_in in self.agreements]
        if self.stopped - self.gone or any(
            self.agreements[f.waiting_in or 0].forgets == f.rank for f in forgotten
        ):
            moments.append(self.clock + 0.2)  # some watcher's patience will come to its end
        if not moments:
            raise HangError(f"at {self.clock:.3f} s nobody can go on: {self._picture()}")
        self.clock = max(self.clock + TICK, min(moments))

    def _picture(self) -> str:
        return "; ".join(f"{f.rank}: {self.dead.get(f.rank) or f.doing}" for f in self.fabrics)


class SimulatedBoard(Board):
    """The board of one host, with ranks that are no processes."""

    def __init__(self, simulation: Simulation) -> None:
        self.size = simulation.grid.ranks
        self._table = np.zeros((self.size, COLUMNS), np.int64)
        self._table[:, PID] = 1 + np.arange(self.size)
        self._simulation = simulation

    def pid(self, rank: int) -> int:
        return int(self._table[rank, PID]) if self._simulation.fabrics[rank].alive else 0

    def _state(self, row: Sequence[int]) -> str:
        rank = row[PID] - 1
        if not self._simulation.fabrics[rank].alive:
            return ""
        return "T" if rank in self._simulation.stopped else "S"

    def kill(self, rank: int) -> None:
        self._simulation.kill(rank, "fenced")


class _Lock:
    """Held by the rank's own task while it is in a phase of the protocol; its watcher finds it so, and keeps out."""

    def __init__(self) -> None:
        self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        return not self._depth

    def release(self) -> None:
        pass

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1


class SimulatedFabric:
    """One virtual rank's end of the simulation."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.rank = rank
        self.size = simulation.grid.ranks
        self.known: list[int] = []
        self.acknowledged: set[int] = set()
        self.task: Any = None
        self.lock = _Lock()
        self.waiting_in: int | None = None
        self.holds = 0
        self.asleep_until = 0.0
        self.doing = "starting"
        self._simulation = simulation
        self._count = 0
        self._ready: Callable[[], bool] = lambda: True

    @property
    def alive(self) -> bool:
        return self.rank not in self._simulation.dead and self.rank not in self._simulation.finished

    def ready(self) -> bool:
        return self._simulation.clock >= self.asleep_until and self._ready()

    def wait(self, doing: str, ready: Callable[[], bool] = lambda: True) -> None:
        """Give the word to the scheduler until `ready()`; the rank may die here."""
        self.doing, self._ready = doing, ready
        self._simulation.count_call(self.rank)
        self._simulation.switch()
        if self.rank in self._simulation.dead:
            raise Died
        self._ready = lambda: True

    @property
    def participants(self) -> frozenset[int]:
        return frozenset(range(self.size))  # nobody can come later

    def asking(self) -> frozenset[int]:
        return frozenset()

    def ask(self) -> Admission:
        raise NotAdmittedError("nobody can join a simulated world")

    def agree(self, word: int, admit: frozenset[int] = frozenset()) -> int | None:
        self.wait("before an agreement")
        self._count += 1
        number = self._count
        self._simulation.board.enter(self.rank, number)
        self.waiting_in = number
        self._simulation.agreements.setdefault(number, _Agreement()).words[self.rank] = int(word)

        def told() -> bool:
            agreement = self._simulation.resolve(number)
            return agreement.resolved and agreement.forgets != self.rank

        self.wait(f"in agreement {number}", told)
        self.waiting_in, self.holds = None, number
        self._simulation.board.finish(self.rank, number)
        self._simulation.agreements[number].holders.add(self.rank)
        return self._simulation.agreements[number].result

    def failed(self) -> frozenset[int]:
        return frozenset(self.known)

    def acknowledge(self, only: frozenset[int] | None = None) -> frozenset[int]:
        for rank in self.known:
            if only is not None and rank not in only:
                break
            self.acknowledged.add(rank)
        return frozenset(self.acknowledged)

    def send(self, data: bytes, to: int, tag: int) -> SimulatedMessage:
        self._simulation.mail[self.rank, to, tag] = data
        return SimulatedMessage(self._simulation, None)

    def receive(self, source: int, tag: int) -> SimulatedMessage:
        return SimulatedMessage(self._simulation, (source, self.rank, tag))

    def linger(self, seconds: float) -> None:
        number, deadline = self._count, self._simulation.clock + seconds
        while self._simulation.clock < deadline and any(
            f.alive and f.holds < number and f is not self for f in self._simulation.fabrics
        ):
            self.pause(0.001)

    def fence(self, rank: int) -> None:
        self._simulation.kill(rank, "seen off")

    def now(self) -> float:
        return self._simulation.clock

    def pause(self, seconds: float) -> None:
        self.asleep_until = self._simulation.clock + seconds
        self.wait("pausing")


class SimulatedMessage:
    def __init__(self, simulation: Simulation, key: tuple[int, int, int] | None) -> None:
        self._mail, self._key = simulation.mail, key
        self.data = b""

    def done(self) -> bool:
        if self._key is None:
            return True
        if self._key in self._mail:
            self.data = self._mail.pop(self._key)
            self._key = None
            return True
        return False
