"""Agreements of virtual ranks, in two models, each with the worst behaviour of the real one that is known.

`OpenMpiAgreements`: a rank's own list of deaths lags; an agreement that meets an unacknowledged death fails
everywhere and drops its word; it may succeed although a rank does not know of a death yet, and include the vote of a
rank that has died since; one rank may never receive the result; if all ranks that held the result have died, the others
may decide again.

`EtcdAgreements`: a decision is made once and kept. A rank is dead when it is declared dead, which takes a while; a
declared rank may still run, stopped or cut off, and ends when it learns of it. Ranks may join.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from recover_lab.simulated_world.scheduler import SimulatedFabric, Simulation

LEASE = 0.3  # virtual seconds after which a rank that is cut off is declared dead


class Agreements(Protocol):
    """Interface of both models to the simulation."""

    participants: frozenset[int]

    def vote(self, fabric: SimulatedFabric, number: int, word: int, admit: frozenset[int]) -> None: ...

    def told(self, fabric: SimulatedFabric, number: int) -> bool:
        """Whether this rank holds the result of agreement `number`, which is decided when no vote is missing."""

    def result(self, fabric: SimulatedFabric, number: int) -> int | None: ...

    def lost(self, rank: int) -> None:
        """The process of this rank has ended, with or without success."""

    def look(self) -> None:
        """Called when time has passed."""

    def moments(self) -> list[float]:
        """Times at which the model acts by itself."""

    def clear(self) -> None: ...


class _Agreement:
    def __init__(self) -> None:
        self.words: dict[int, int] = {}
        self.resolved = False
        self.result: int | None = None
        self.forgets: int | None = None
        self.holders: set[int] = set()  # ranks that have the result


class OpenMpiAgreements:
    def __init__(self, simulation: Simulation, stalls: int) -> None:
        self.participants = frozenset(range(simulation.grid.ranks))
        self._simulation, self._rng, self._stalls = simulation, simulation.rng, stalls
        self._agreements: dict[int, _Agreement] = {}
        self._notices: list[tuple[float, int, int]] = []  # (time, rank that learns, rank that died)

    def vote(self, fabric: SimulatedFabric, number: int, word: int, admit: frozenset[int]) -> None:
        self._agreements.setdefault(number, _Agreement()).words[fabric.rank] = word

    def told(self, fabric: SimulatedFabric, number: int) -> bool:
        agreement = self._resolve(number)
        return agreement.resolved and agreement.forgets != fabric.rank

    def result(self, fabric: SimulatedFabric, number: int) -> int | None:
        agreement = self._agreements[number]
        agreement.holders.add(fabric.rank)
        return agreement.result

    def lost(self, rank: int) -> None:
        for fabric in self._simulation.fabrics:
            late = self._rng.choice((0.0, 0.0005, 0.002, 0.01, 0.03)) * self._rng.random()
            self._notices.append((self._simulation.clock + late, fabric.rank, rank))
        mail = self._simulation.mail
        for key in [key for key in mail if key[0] == rank and rank in self._simulation.dead]:
            if self._rng.random() < 0.5:
                del mail[key]

    def look(self) -> None:
        clock = self._simulation.clock
        due = [notice for notice in self._notices if notice[0] <= clock]
        if due:
            self._notices = [notice for notice in self._notices if notice[0] > clock]
            for _, whom, who in due:
                if who not in self._simulation.fabrics[whom].known:
                    self._simulation.fabrics[whom].known.append(who)

    def moments(self) -> list[float]:
        moments = [when for when, _, _ in self._notices]
        waiting = [f for f in self._simulation.living if f.waiting_in in self._agreements]
        if any(self._agreements[f.waiting_in or 0].forgets == f.rank for f in waiting):
            moments.append(self._simulation.clock + 0.2)  # its watcher's timeout
        return moments

    def clear(self) -> None:
        self._agreements.clear()

    def _resolve(self, number: int) -> _Agreement:
        """Decide an agreement once no vote of a living rank is missing."""
        agreement = self._agreements.setdefault(number, _Agreement())
        gone = self._simulation.gone
        if agreement.holders and agreement.holders <= gone:
            # All ranks that held the result have died: the others may have to decide again.
            agreement.holders, agreement.forgets = set(), None
            if self._rng.random() < 0.5:
                agreement.resolved, agreement.result = False, None
        alive = self._simulation.living
        if agreement.resolved or any(f.rank not in agreement.words for f in alive):
            return agreement
        agreement.resolved = True
        counted = {f.rank for f in alive}
        success = True
        for dead in sorted(gone):
            if dead in agreement.words and self._rng.random() < 0.5:
                counted.add(dead)
                continue
            knowers = [f for f in alive if dead in f.known]
            if not knowers:  # the agreement itself meets the death, and one rank learns of it
                for fabric in self._rng.sample(alive, self._rng.randint(1, len(alive))):
                    fabric.known.append(dead)
                success = False
            elif any(dead not in f.acknowledged for f in knowers):
                success = False
        if success:
            agreement.result = -1
            for rank in counted:
                agreement.result &= agreement.words[rank]
        if self._stalls and len(alive) > 1 and self._rng.random() < 0.1:
            self._stalls -= 1
            agreement.forgets = self._rng.choice(alive).rank
        return agreement


@dataclass(frozen=True)
class _Decision:
    word: int | None
    dead: frozenset[int]
    participants: frozenset[int]  # from the next agreement on


@dataclass(frozen=True)
class _Vote:
    word: int
    acknowledged: frozenset[int]
    admit: frozenset[int]


class EtcdAgreements:
    def __init__(self, simulation: Simulation) -> None:
        self.participants = frozenset(range(simulation.grid.ranks))
        self.declared: list[int] = []  # in the order of their keys, the same for all ranks
        self.decisions: list[_Decision] = []
        self._simulation, self._rng = simulation, simulation.rng
        self._votes: dict[int, _Vote] = {}  # of the agreement that is not decided yet
        self._due: list[tuple[float, int]] = []  # (time, rank): will be declared
        self._heard: list[tuple[float, int, int]] = []  # (time, rank that learns, number of deaths)

    def declare(self, rank: int) -> None:
        """Declare a rank dead for all ranks, permanently, even if its process still runs."""
        if rank in self.declared:
            return
        self.declared.append(rank)
        for fabric in self._simulation.fabrics:
            late = self._rng.choice((0.0, 0.0005, 0.002, 0.01, 0.03)) * self._rng.random()
            self._heard.append((self._simulation.clock + late, fabric.rank, len(self.declared)))

    def vote(self, fabric: SimulatedFabric, number: int, word: int, admit: frozenset[int]) -> None:
        self._learn(fabric)
        assert number == len(self.decisions) + 1, (
            f"rank {fabric.rank} votes {number} of {len(self.decisions)}"
        )
        assert fabric.rank in self.participants, f"rank {fabric.rank} votes, and nobody has admitted it"
        self._votes[fabric.rank] = _Vote(word, frozenset(fabric.acknowledged), admit)

    def told(self, fabric: SimulatedFabric, number: int) -> bool:
        if self._simulation.is_cut_off(fabric.rank):
            return False
        self._decide(number)
        # A rank that was declared dead does not wait: it learns of it here.
        return len(self.decisions) >= number or fabric.rank in self.declared

    def result(self, fabric: SimulatedFabric, number: int) -> int | None:
        if len(self.decisions) != number or fabric.rank in self.decisions[number - 1].dead:
            self._simulation.end(fabric.rank)  # the others have continued without it
        if fabric.rank in self.declared and self._rng.random() < 0.5:
            self._simulation.end(fabric.rank)  # it may learn of its own death first
        self._learn(fabric, only_dead_of=number)
        return self.decisions[number - 1].word

    def lost(self, rank: int) -> None:
        ended = rank in self._simulation.finished and self._rng.random() < 0.5
        if ended and self._simulation.finished[rank] == "done":
            return  # a rank that has ended with success is not declared
        # The agent of its host sees the exit; without an agent the lease expires.
        late = self._rng.choice((0.0, 0.001, 0.01, LEASE)) * self._rng.random()
        self._due.append((self._simulation.clock + late, rank))

    def cut(self, rank: int, until: float) -> None:
        """Cut a rank off until then; it is declared dead if that is longer than a lease."""
        if until > self._simulation.clock + LEASE:
            self._due.append((self._simulation.clock + LEASE, rank))

    def look(self) -> None:
        clock = self._simulation.clock
        for when, rank in [each for each in self._due if each[0] <= clock]:
            self._due.remove((when, rank))
            self.declare(rank)
        if not any(when <= clock for when, _, _ in self._heard):
            return
        late = []
        for when, whom, count in self._heard:
            if when > clock or self._simulation.is_cut_off(whom):
                late.append((when, whom, count))
                continue
            self._learn(self._simulation.fabrics[whom], count)
            if whom in self.declared[:count]:
                self._simulation.kill(whom, "declared")
        self._heard = late

    def moments(self) -> list[float]:
        everyone = (fabric.rank for fabric in self._simulation.fabrics)
        deaf = self._simulation.gone | {rank for rank in everyone if self._simulation.is_cut_off(rank)}
        return [when for when, _ in self._due] + [when for when, whom, _ in self._heard if whom not in deaf]

    def clear(self) -> None:
        self._votes.clear()

    def _learn(
        self, fabric: SimulatedFabric, count: int | None = None, only_dead_of: int | None = None
    ) -> None:
        """A rank learns of deaths in the order of their keys."""
        if only_dead_of is not None:
            dead = self.decisions[only_dead_of - 1].dead
            count = max((self.declared.index(rank) + 1 for rank in dead), default=0)
        fabric.known += [rank for rank in self.declared[:count] if rank not in fabric.known]

    def _decide(self, number: int) -> None:
        """Decide once all ranks that are not declared dead have voted. Any rank may do it: there is one decision."""
        living = self.participants - set(self.declared)
        if len(self.decisions) >= number or not living or not living <= self._votes.keys():
            return
        dead = frozenset(self.declared) & self.participants
        votes = [self._votes[rank] for rank in living]
        word = None
        if all(dead <= vote.acknowledged for vote in votes):
            word = -1
            admitted = set(self._simulation.asked) - set(self.declared)
            for vote in votes:
                word &= vote.word
                admitted &= vote.admit
            self.participants = living | admitted
        self._votes.clear()
        self.decisions.append(_Decision(word, dead, self.participants))
