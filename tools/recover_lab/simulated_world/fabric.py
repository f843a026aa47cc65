"""The fabric of a virtual rank: the interface that the protocol is written against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import greenlet

from recover.world.fabrics.base import Admission, FabricError, NotAdmittedError

if TYPE_CHECKING:
    from recover_lab.simulated_world.scheduler import Simulation


class Died(greenlet.GreenletExit):
    """Unwinds the greenlet of a rank that dies."""


class _Lock:
    """Held by the rank's task during a phase of the protocol; its watcher does not run meanwhile."""

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
    """The fabric of one virtual rank."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.rank = rank
        self.size = simulation.grid.ranks
        self.known: list[int] = []
        self.acknowledged: set[int] = set()
        self.task: Any = None
        self.alive = True  # until it is killed or has finished
        self.lock = _Lock()
        self.waiting_in: int | None = None
        self.holds = 0
        self.asleep_until = 0.0
        self.doing = "starting"
        self._simulation = simulation
        self._count = 0
        self._participants = frozenset(range(simulation.grid.ranks))
        self._late: dict[int, float] = {}  # by asking rank: how long until this rank learns of it
        self._ready: Callable[[], bool] = lambda: True

    def ready(self) -> bool:
        return self._simulation.clock >= self.asleep_until and self._ready()

    def wait(self, doing: str, ready: Callable[[], bool] = lambda: True) -> None:
        """Yield to the scheduler until `ready()`; the rank may die here."""
        self.doing, self._ready = doing, ready
        self._simulation.count_call(self.rank)
        self._simulation.switch()
        if self.rank in self._simulation.dead:
            raise Died
        self._ready = lambda: True

    @property
    def participants(self) -> frozenset[int]:
        return self._participants

    @property
    def agreements(self) -> int:
        return self._count

    def reach(self, doing: str) -> None:
        """Wait until this rank is not cut off."""
        if self._simulation.is_cut_off(self.rank):
            self.wait(doing, lambda: not self._simulation.is_cut_off(self.rank))

    def agree(self, word: int, admit: frozenset[int] = frozenset()) -> int | None:
        self.wait("before an agreement")
        self._reach()
        number = self._count + 1
        self._simulation.board.enter(self.rank, number)
        self.waiting_in = None if self._simulation.kept else number
        self._simulation.agreements.vote(self, number, int(word), admit)
        self.wait(f"in agreement {number}", lambda: self._simulation.agreements.told(self, number))
        result = self._simulation.agreements.result(self, number)
        self._count, self.waiting_in, self.holds = number, None, number
        self._participants = self._simulation.agreements.participants
        self._simulation.board.finish(self.rank, number)
        return result

    def asking(self) -> frozenset[int]:
        """Ranks that ask to join, in whole replicas; this rank learns of each after its own delay."""
        simulation = self._simulation
        asked = {
            rank
            for rank, since in simulation.asked.items()
            if since + self._hears_after(rank) <= simulation.clock and rank not in self.known
        }
        return frozenset(simulation.grid.whole(asked - self._participants))

    def ask(self) -> Admission:
        simulation, kept = self._simulation, self._simulation.kept
        if kept is None:
            raise NotAdmittedError("nobody can join a job on Open MPI")
        self.wait("before it asks")
        simulation.asked[self.rank] = simulation.clock

        def told() -> bool:
            return self.rank in kept.participants or kept.participants <= simulation.gone

        self.wait("asking to join", told)
        if self.rank not in kept.participants:
            raise NotAdmittedError("nobody is left whom it could join")
        del simulation.asked[self.rank]
        # Later decisions wait for the vote of this rank, so the latest one has admitted it or does not include it.
        self._count = self.holds = next(
            n for n, decision in enumerate(kept.decisions, 1) if self.rank in decision.participants
        )
        self._participants = kept.decisions[self._count - 1].participants
        return Admission(self._count, self._participants)

    def _reach(self) -> None:
        """Wait until the others can be reached; they may have continued without this rank."""
        self.reach("reaching the others")
        kept = self._simulation.kept
        if kept and (self.rank in kept.declared or len(kept.decisions) > self._count):
            self._simulation.end(self.rank)

    def _hears_after(self, rank: int) -> float:
        if rank not in self._late:
            self._late[rank] = (
                self._simulation.rng.choice((0.0, 0.001, 0.01, 0.03)) * self._simulation.rng.random()
            )
        return self._late[rank]

    def failed(self) -> frozenset[int]:
        return frozenset(self.known)

    def look_for_exits(self, now: float) -> None:
        """The simulation decides when a rank learns of a death."""

    def heartbeats(self) -> Mapping[int, int]:
        return {}

    def acknowledge(self, only: frozenset[int] | None = None) -> frozenset[int]:
        for rank in self.known:
            if only is not None and rank not in only:
                break
            self.acknowledged.add(rank)
        return frozenset(self.acknowledged)

    def send(self, data: bytes, to: int, tag: int) -> SimulatedMessage:
        self._reach()
        self._simulation.mail[self.rank, to, tag] = data
        return SimulatedMessage(self._simulation, None)

    def receive(self, source: int, tag: int) -> SimulatedMessage:
        return SimulatedMessage(self._simulation, (source, self.rank, tag))

    def send_to_all(self, data: bytes, to: Sequence[int], tag: int) -> list[SimulatedMessage]:
        return [self.send(data, one, tag) for one in to]

    def receive_as_all(self, source: int, tag: int) -> SimulatedMessage:
        return self.receive(source, tag)

    def linger(self, seconds: float) -> None:
        if self._simulation.kept:
            return  # no other rank needs this one for the result
        number, deadline = self._count, self._simulation.clock + seconds
        while self._simulation.clock < deadline and any(
            f.holds < number and f is not self for f in self._simulation.living
        ):
            self.pause(0.001)

    def fence(self, rank: int) -> None:
        self._simulation.kill(rank, "seen off")
        if self._simulation.kept:
            self._simulation.kept.declare(rank)

    def now(self) -> float:
        return self._simulation.clock

    def pause(self, seconds: float) -> None:
        self.asleep_until = self._simulation.clock + seconds
        self.wait("pausing")


class SimulatedMessage:
    def __init__(self, simulation: Simulation, key: tuple[int, int, int] | None) -> None:
        self._simulation, self._key = simulation, key
        self.data = b""

    def done(self) -> bool:
        if self._key is None:
            return True
        source, receiver, _ = self._key
        if self._simulation.is_cut_off(receiver):
            return False
        if self._key in self._simulation.mail:
            self.data = self._simulation.mail.pop(self._key)
            self._key = None
            return True
        if self._simulation.kept and source in self._simulation.fabrics[receiver].known:
            raise FabricError(f"rank {source} is dead, and has not sent what was waited for")
        return False
