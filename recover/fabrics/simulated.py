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
from collections.abc import Callable, Mapping
from typing import Any

import greenlet

from recover.carriers.contract import CarrierError
from recover.job.grid import Grid
from recover.world.watchdog import AgreementWatchdog

TICK = 0.0002  # virtual seconds per scheduling decision


class HangError(Exception):
    """Living ranks wait for something that can never happen."""


class _Died(greenlet.GreenletExit):
    """Unwinds the greenlet of a rank that dies."""


class _Agreement:
    def __init__(self) -> None:
        self.words: dict[int, int] = {}
        self.resolved = False
        self.result: int | None = None
        self.forgets: int | None = None
        self.holders: set[int] = set()  # who has the result


class Simulation:
    """`programs` get their fabric and run to the end or die. `kills`: after how many calls a rank dies.

    `sick`: from which to which try a rank's carrier fails, and whether it can be made then, or only not be built.
    """

    def __init__(
        self,
        grid: Grid,
        seed: int,
        kills: Mapping[int, int] | None = None,
        stalls: int = 0,
        limit: int = 200_000,
        sick: Mapping[int, tuple[int, int, bool]] | None = None,
    ) -> None:
        self.grid = grid
        self.rng = random.Random(seed)
        self.clock = 0.0
        self.fabrics = [SimulatedFabric(self, rank) for rank in range(grid.ranks)]
        self.dead: dict[int, str] = {}
        self.finished: dict[int, Any] = {}
        self.mail: dict[tuple[int, int, int], bytes] = {}
        self.agreements: dict[int, _Agreement] = {}
        self.reductions: dict[object, _Reduction] = {}
        self.revoked: set[object] = set()
        self._kills = dict(kills or {})
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
        while any(fabric.alive for fabric in self.fabrics):
            self._limit -= 1
            if self._limit < 0:
                raise HangError(f"no end in sight at {self.clock:.3f} s: {self._picture()}")
            self._deliver()
            self._watch()
            ready = [f for f in self.fabrics if f.alive and f.ready()]
            if not ready:
                self._skip_ahead()
                continue
            self.clock += TICK
            self.rng.choice(ready).task.switch()
        return self.finished

    def _guard(
        self, program: Callable[[SimulatedFabric], Any], fabric: SimulatedFabric
    ) -> Callable[[], None]:
        def body() -> None:
            try:
                result = program(fabric)
            except _Died:
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
        left = self._kills.get(rank)
        if left is not None:
            self._kills[rank] = left - 1
            if left <= 0:
                self.kill(rank, "killed")
                raise _Died

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

    def _watch(self) -> None:
        """What each rank's watcher thread does: leave if a mate is dead, give up if forgotten."""
        furthest = max((f.holds for f in self.fabrics if f.alive), default=0)
        for fabric in self.fabrics:
            if not fabric.alive:
                continue
            held = fabric.waiting_in is not None and furthest >= fabric.waiting_in
            if fabric.outside_protocol and self.grid.mates(fabric.rank) & set(fabric.known):
                self.kill(fabric.rank, "orphan")
            elif fabric.watchdog.forgotten(fabric.waiting_in, held, self.clock):
                self.kill(fabric.rank, "fenced")

    def _skip_ahead(self) -> None:
        """Nobody can run: on to the next moment at which something happens by itself."""
        moments = [when for when, _, _ in self._notices]
        moments += [f.asleep_until for f in self.fabrics if f.alive and f.asleep_until > self.clock]
        forgotten = [f for f in self.fabrics if f.alive and f.waiting_in in self.agreements]
        moments += [
            self.clock + 1.0 for f in forgotten if self.agreements[f.waiting_in or 0].forgets == f.rank
        ]
        if not moments:
            raise HangError(f"at {self.clock:.3f} s nobody can go on: {self._picture()}")
        self.clock = max(self.clock + TICK, min(moments))

    def _picture(self) -> str:
        return "; ".join(f"{f.rank}: {self.dead.get(f.rank) or f.doing}" for f in self.fabrics)


class SimulatedFabric:
    """One virtual rank's end of the simulation."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.rank = rank
        self.size = simulation.grid.ranks
        self.known: list[int] = []
        self.acknowledged: set[int] = set()
        self.task: Any = None
        self.watchdog = AgreementWatchdog()
        self.waiting_in: int | None = None
        self.holds = 0
        self.asleep_until = 0.0
        self.doing = "starting"
        self.outside_protocol = False  # as while it computes or waits for data: a dead mate makes it leave
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
        self._simulation.count_call(self.rank)
        self.doing, self._ready = doing, ready
        self._simulation.switch()
        if self.rank in self._simulation.dead:
            raise _Died
        self._ready = lambda: True

    def agree(self, word: int) -> int | None:
        self.wait("before an agreement")
        self._count += 1
        number = self.waiting_in = self._count
        self._simulation.agreements.setdefault(number, _Agreement()).words[self.rank] = int(word)

        def told() -> bool:
            agreement = self._simulation.resolve(number)
            return agreement.resolved and agreement.forgets != self.rank

        self.wait(f"in agreement {number}", told)
        self.waiting_in, self.holds = None, number
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


class _Reduction:
    def __init__(self) -> None:
        self.parts: dict[int, frozenset[object]] = {}


class SimulatedCarriers:
    """Carriers whose reductions unite sets, so that a missing, doubled or stale part shows."""

    settle = 0.002

    def __init__(self, simulation: Simulation, fabric: SimulatedFabric) -> None:
        self._simulation, self._fabric = simulation, fabric
        self._made = 0

    def make(self, members: tuple[int, ...]) -> SimulatedCarrier:
        self._made += 1
        first, last, can_be_made = self._simulation.sick.get(self._fabric.rank, (0, -1, True))
        is_sick = first <= self._made <= last
        if is_sick and not can_be_made:
            raise OSError("no socket is left")
        peers = self._simulation.grid.peers(self._fabric.rank, members)
        key = (self._fabric.holds, peers)
        return SimulatedCarrier(self._simulation, self._fabric, key, members, peers, is_sick)


class SimulatedCarrier:
    def __init__(
        self,
        simulation: Simulation,
        fabric: SimulatedFabric,
        key: object,
        members: tuple[int, ...],
        peers: tuple[int, ...],
        is_sick: bool,
    ) -> None:
        self._simulation, self._fabric, self._key, self._is_sick = simulation, fabric, key, is_sick
        self.members, self.peers = frozenset(members), frozenset(peers)
        self._operations = 0

    def offer(self) -> bytes:
        return b"%d" % self._fabric.rank

    def build(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        for rank, offer in offers.items():
            assert offer == b"%d" % rank, "the census mixed up its rows"
        someone_died = not set(self._simulation.dead).isdisjoint(offers)
        if not confirm(not (someone_died and self._simulation.rng.random() < 0.5)):
            raise CarrierError("the constructor failed somewhere")
        if self.reduce(frozenset({("try", self._fabric.rank)})) != {("try", rank) for rank in self.peers}:
            raise CarrierError("the trial sum is wrong")
        if self._is_sick:
            raise CarrierError("the trial sum took for ever")

    def free(self) -> None:
        self._simulation.revoked.add(self._key)

    def reduce(self, part: frozenset[object]) -> frozenset[object]:
        """The union over the group. Raises CarrierError; a death may be met by some members and not by others."""
        self._operations += 1
        key = (self._key, self._operations)
        reduction = self._simulation.reductions.setdefault(key, _Reduction())
        reduction.parts[self._fabric.rank] = part

        def freed() -> bool:  # what the watcher does: whoever knows of a death frees the whole group
            if not self.members.isdisjoint(self._fabric.known):
                self.free()
            return self._key in self._simulation.revoked

        self._fabric.wait("in a reduction", lambda: reduction.parts.keys() >= self.peers or freed())
        hit = freed() or not self.peers.isdisjoint(self._simulation.dead)
        if not reduction.parts.keys() >= self.peers or (hit and self._simulation.rng.random() < 0.5):
            self.free()
            raise CarrierError("the reduction was hit by a death")
        return frozenset().union(*reduction.parts.values())
