"""The simulated fabric: many virtual ranks in one process, under a deterministic scheduler.

The same protocol code as over Open MPI and etcd runs here, one greenlet per rank; at every call the scheduler picks,
from a seed, the rank that runs next and the ranks that die. It has the worst behaviour of the real systems: agreements
are modelled by `agreements.py`; a reduction that meets a death succeeds on some ranks and fails on others; messages of
a dying rank may be lost; carriers of a rank may fail, for a while or for ever. In the model of etcd a rank may be cut
off from all others for a while, or be declared dead while it lives, and replicas may ask to join.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import greenlet

from recover.job.grid import Grid
from recover.world.liveness.board import ScriptStage
from recover_lab.simulated_world.agreements import Agreements, EtcdAgreements, OpenMpiAgreements
from recover_lab.simulated_world.board import SimulatedBoard
from recover_lab.simulated_world.fabric import Died, SimulatedFabric

__all__ = ["Died", "HangError", "SimulatedFabric", "Simulation"]

TICK = 0.0002  # virtual seconds per scheduling decision
LOOKS = 0.15  # share of the watchers that run between two decisions
PATIENCE = 10.0  # virtual seconds that joining ranks wait for a stopped rank; several hang limits


class HangError(Exception):
    """Living ranks wait for something that can never happen."""


class Simulation:
    """Runs a program on every rank, until all have ended or died.

    `kills`: by rank, the number of calls after which it dies; `stops`: ... after which it is stopped for ever.

    `sick`: the tries at which a rank's carrier fails, and whether it fails when it is made or when it is built.
    `kept`: agreements are etcd's, not Open MPI's. Then `joiners` is the number of replicas beyond the grid that ask to
    join; `suspicions`: calls after which a rank is declared dead while it lives; `cuts`: calls after which it is cut
    off from all others, and for how many seconds.
    """

    def __init__(
        self,
        grid: Grid,
        seed: int,
        kills: Mapping[int, int] | None = None,
        stalls: int = 0,
        limit: int = 100_000,
        sick: Mapping[int, tuple[int, int, bool]] | None = None,
        stops: Mapping[int, int] | None = None,
        *,
        kept: bool = False,
        joiners: int = 0,
        suspicions: Mapping[int, int] | None = None,
        cuts: Mapping[int, tuple[int, float]] | None = None,
    ) -> None:
        self.grid = grid
        self.rng = random.Random(seed)
        self.clock = 0.0
        self.size = (grid.replicas + joiners) * grid.replica_size
        self.fabrics = [SimulatedFabric(self, rank) for rank in range(self.size)]
        self.living = list(self.fabrics)
        self.dead: dict[int, str] = {}
        self.finished: dict[int, Any] = {}
        self.mail: dict[tuple[int, int, int], bytes] = {}
        self.kept = EtcdAgreements(self) if kept else None
        self.agreements: Agreements = self.kept or OpenMpiAgreements(self, stalls)
        self.asked: dict[int, float] = {}  # ranks that ask to join, and since when
        self.reductions: dict[object, Any] = {}  # contributions to operations in progress, by contributor
        self.revoked: set[object] = set()
        self.board = SimulatedBoard(
            self.size,
            lambda rank: self.fabrics[rank].alive,
            lambda rank: rank in self.stopped,
            lambda rank: self.kill(rank, "fenced"),
        )
        self.watchers: dict[int, Callable[[float], None]] = {}  # by rank: runs its watcher once
        self.stopped: set[int] = set()  # as by a signal: these ranks neither run nor die
        self._kills, self._stops = dict(kills or {}), dict(stops or {})
        self._suspicions = dict(suspicions or {})
        self._cuts = {rank: calls for rank, (calls, _) in (cuts or {}).items()}
        self._cut_for = {rank: seconds for rank, (_, seconds) in (cuts or {}).items()}
        self._cut_until: dict[int, float] = {}
        # Since when no whole replica with the state runs, and a rank is stopped.
        self._without_state_since: float | None = None
        self._limit = limit
        self.sick = dict(sick or {})
        self.torn: dict[int, int] = {}  # by rank: exchanges that fail without a death
        self._link_cuts: dict[int, int] = {}
        self._link_ends: dict[int, int] = {}
        self.broken_links: set[frozenset[int]] = set()  # pairs of ranks that do not reach each other
        self.notices: dict[int, int] = {}  # by rank: its host is asked to leave after so many calls
        self.noticed: set[int] = set()  # ranks whose hosts were asked to leave
        self.reluctant = False  # for programs: an evicted rank does not leave by itself ...
        self.leaving: set[int] = set()  # ... but stays as long as others run
        self._scheduler = greenlet.getcurrent()

    def run(self, program: Callable[[SimulatedFabric], Any]) -> dict[int, Any]:
        """Run the program on every rank; returns the results of the survivors. Raises HangError."""
        for fabric in self.fabrics:
            fabric.task = greenlet.greenlet(self._guard(program, fabric))
        while self._anybody_can_go_on():
            self._limit -= 1
            if self._limit < 0:
                raise HangError(f"no end in sight at {self.clock:.3f} s: {self._picture()}")
            self.agreements.look()
            self._watch(LOOKS)
            ready = self._ready()
            if not ready:
                self._watch(1.0)
                if not self._ready():
                    self._skip_ahead()
                continue
            self.clock += TICK
            self.rng.choice(ready).task.switch()
        # Greenlets of dead ranks are suspended in their programs and hold memory: a thousand runs would fill it.
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
                self._remove_from_living(fabric)
                self.agreements.lost(fabric.rank)  # a rank that exits without MPI_Finalize counts as dead

        return body

    def kill(self, rank: int, why: str) -> None:
        """Kill a rank now. Each of the others learns of it at its own time."""
        if rank in self.dead or rank in self.finished:
            return
        self.dead[rank] = why
        self._remove_from_living(self.fabrics[rank])
        self.agreements.lost(rank)

    def _remove_from_living(self, fabric: SimulatedFabric) -> None:
        fabric.alive = False
        self.living = [other for other in self.living if other.alive]

    def end(self, rank: int) -> NoReturn:
        """End a rank that learns that it was declared dead."""
        self.kill(rank, "declared")
        raise Died

    def is_cut_off(self, rank: int) -> bool:
        return self._cut_until.get(rank, 0.0) > self.clock

    @property
    def staying(self) -> set[int]:
        members = self.agreements.participants
        return {f.rank for f in self.living if f.rank in members} - self.leaving

    @property
    def gone(self) -> set[int]:
        return {*self.dead, *self.finished}

    def count_call(self, rank: int) -> None:
        """Count a call of a rank, and apply a fault that is due."""
        strikes = (
            (self._kills, self._strike_dead),
            (self._stops, self.stopped.add),
            (self._suspicions, self._suspect),
            (self._cuts, self._cut_off),
            (self.notices, self.noticed.add),
            (self._link_cuts, self._cut_link),
        )
        for schedule, strike in strikes:
            left = schedule.get(rank)
            if left is not None:
                schedule[rank] = left - 1
                if left == 0:
                    strike(rank)

    def cut_links(self, links: Mapping[int, tuple[int, int]]) -> None:
        """Let links break. `links`, by rank: its number of calls after which its link breaks, and the other rank."""
        self._link_cuts = {rank: calls for rank, (calls, _) in links.items()}
        self._link_ends = {rank: other for rank, (_, other) in links.items()}

    def _cut_link(self, rank: int) -> None:
        self.broken_links.add(frozenset((rank, self._link_ends[rank])))

    def kill_at_next_call(self, rank: int) -> None:
        self._kills[rank] = 0

    def _strike_dead(self, rank: int) -> None:
        self.kill(rank, "killed")
        raise Died

    def _suspect(self, rank: int) -> None:
        assert self.kept is not None
        self.kept.declare(rank)

    def _cut_off(self, rank: int) -> None:
        assert self.kept is not None
        self._cut_until[rank] = self.clock + self._cut_for[rank]
        self.kept.cut(rank, self._cut_until[rank])

    def switch(self) -> None:
        self._scheduler.switch()

    def _ready(self) -> list[SimulatedFabric]:
        return [f for f in self.living if f.rank not in self.stopped and f.ready()]

    def _anybody_can_go_on(self) -> bool:
        """Whether a rank lives whose replica has no stopped rank.

        No rank fences a stopped rank while no other whole replica has the state: joining ranks may not fence, and
        agents, which end stopped ranks of lost replicas, are not simulated.
        """
        if not self.stopped and not self.asked:  # nearly always
            return bool(self.living)
        held_up = set(self.grid.replicas_of(self.stopped - self.gone)) if self.stopped else ()
        able = [f.rank for f in self.living if self.grid.replica(f.rank) not in held_up]
        if able and held_up and not self.grid.whole(filter(self._holds_state, able)):
            # PATIENCE is long enough for a watcher that would end the stopped rank.
            self._without_state_since = self._without_state_since or self.clock
            return self.clock - self._without_state_since < PATIENCE
        self._without_state_since = None
        # A rank that asks to join can only wait for an answer.
        members = self.agreements.participants
        return any(rank not in self.asked or rank in members or members <= self.gone for rank in able)

    def _holds_state(self, rank: int) -> bool:
        return rank < self.grid.ranks or self.board.stage(rank) is ScriptStage.STATE

    def _watch(self, share: float) -> None:
        """Run this share of the watchers of all running ranks."""
        for rank, look in self.watchers.items():
            if self.fabrics[rank].alive and rank not in self.stopped and self.rng.random() < share:
                self.board.beat(rank)
                try:
                    look(self.clock)
                except Died:
                    pass  # the watcher ended its own rank

    def _skip_ahead(self) -> None:
        """No rank can run: advance the clock to the next time at which something happens by itself."""
        moments = self.agreements.moments()
        moments += [f.asleep_until for f in self.living if f.asleep_until > self.clock]
        moments += [until for until in self._cut_until.values() if until > self.clock]
        if self.stopped - self.gone:
            moments.append(self.clock + 0.2)  # a watcher's timeout
        calls = self.board.calls()
        if len({position for position, _ in calls}) < len(calls):
            moments.append(self.clock + 0.2)  # a watcher will notice the calls that differ
        if not moments and not self._anybody_can_go_on():
            return  # the last rank has just left
        if not moments:
            raise HangError(f"at {self.clock:.3f} s nobody can go on: {self._picture()}")
        self.clock = max(self.clock + TICK, min(moments))

    def _picture(self) -> str:
        return "; ".join(f"{f.rank}: {self.dead.get(f.rank) or f.doing}" for f in self.fabrics)
