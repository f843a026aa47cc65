"""The matrix of deaths, location x role x number, laid out so that one launch serves many cells.

A cell is (location, role, mode). Modes: with `one` a replica dies there alone, with `two` another dies there at the
same time, with `then` another dies in the recovery from it. In a recovery only the second replica
dies, so locations inside a recovery have the one mode `then`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

from recover.faults import Fault
from recover.faults.locations import (
    AFTER_VERDICT,
    IN_INSTALMENTS,
    LOCATIONS,
    OUTSIDE,
    REPAIR_PHASES,
    VERIFIED,
)
from recover.policy import FailureEvent, Role, get_policy

ROLES = (
    "major",
    "minor",
    "spare",
    "rank 0",
    "writer",
)  # writer: the lowest living rank after rank 0 has died
MODES = ("one", "two", "then")
RECOVERIES = (*(f"repair:{phase}" for phase in REPAIR_PHASES), "extra")
PLACES = tuple(
    location
    for location in LOCATIONS
    if location not in ("repair", "extra", *OUTSIDE, *VERIFIED, *IN_INSTALMENTS)
)
SETTLED = 2  # steps between two events, so that each is repaired before the next


@dataclass(frozen=True)
class Cell:
    location: str
    role: str
    mode: str


def all_cells() -> list[Cell]:
    cells = [Cell(*each) for each in product(PLACES, ROLES, MODES)]
    return cells + [Cell(location, role, "then") for location, role in product(RECOVERIES, ROLES)]


@dataclass
class Launch:
    """One job: its batch, its faults, and the cells that they test."""

    global_batch: int
    faults: list[Fault] = field(default_factory=list)
    cells: set[Cell] = field(default_factory=set)

    @property
    def steps(self) -> int:
        return max((fault.step for fault in self.faults), default=0) + SETTLED

    @property
    def checkpoint_every(self) -> int:
        return int(any(fault.location == "checkpoint" for fault in self.faults))


def lay_out(cells: Sequence[Cell], replicas: int, replica_size: int, policy: str) -> Iterator[Launch]:
    """Launches that test all cells that can be tested; those with the most cells come first."""
    missing = set(cells)
    # Batches with a minor or a spare at the start, and batches with one after some losses.
    batches = (replicas, replicas + 1, max(replicas, 2 * replicas - 3))
    while missing:
        tries = [_fill(Launch(batch), missing, replicas, replica_size, policy) for batch in batches]
        best = max(tries, key=lambda launch: len(launch.cells))
        if not best.cells:
            return  # this policy has no such role, or no such recovery
        missing -= best.cells
        yield best


def _fill(launch: Launch, missing: set[Cell], replicas: int, replica_size: int, policy: str) -> Launch:
    """Add events until one replica is left, or until no cell is left to test."""
    alive, step = list(range(replicas)), 1
    while len(alive) > 1:
        event = max(
            _events(tuple(alive), missing - launch.cells, launch.global_batch, policy),
            key=_worth,
            default=None,
        )
        if event is None:
            break
        served, deaths = event
        for location, replica in deaths:
            name, _, detail = location.partition(":")
            late = name in ("repair", "extra") and deaths[0][0] in AFTER_VERDICT
            local = 0 if replica == min(alive) else (step + replica) % replica_size
            launch.faults.append(Fault(step + late, replica, name, local, detail or None))
            alive.remove(replica)
        launch.cells |= served
        step += SETTLED + 1
    return launch


Event = tuple[set[Cell], list[tuple[str, int]]]  # cells, and (location, replica) of each death


def _worth(event: Event) -> float:
    served, deaths = event
    return len(served) / len(deaths)


def _events(alive: tuple[int, ...], missing: set[Cell], batch: int, policy: str) -> Iterator[Event]:
    """All single deaths and pairs that test a missing cell."""
    roles = {replica: _roles(replica, alive, batch, policy) for replica in alive}
    for location, first in product(PLACES, alive):
        served = {Cell(location, role, "one") for role in roles[first]} & missing
        if served:
            yield served, [(location, first)]
        if len(alive) < 3:
            continue
        for second in alive:
            if second > first:
                both = {Cell(location, role, "two") for r in (first, second) for role in roles[r]} & missing
                if both:
                    yield both, [(location, first), (location, second)]
            if second == first:
                continue
            for where in RECOVERIES:
                if where == "extra" and second not in runs_extra(location, first, alive, batch, policy):
                    continue
                then = {Cell(location, role, "then") for role in roles[first]}
                then |= {Cell(where, role, "then") for role in roles[second]}
                if then & missing:
                    yield then & missing, [(location, first), (where, second)]


@cache
def _roles(replica: int, alive: tuple[int, ...], batch: int, policy: str) -> set[str]:
    role = get_policy(policy, len(alive)).layout(alive, batch).share(replica).role
    names = {"spare" if role.is_spare else "minor" if role is Role.MINOR else "major"}
    if replica == min(alive):
        names.add("writer" if replica else "rank 0")
    return names


@cache
def runs_extra(location: str, dead: int, alive: tuple[int, ...], batch: int, policy: str) -> set[int]:
    """Replicas that run extra microbatches after `dead` has died there; none if the step may be complete without it."""
    if location in ("in-totals", "vote", *AFTER_VERDICT):
        return set()
    rules = get_policy(policy, len(alive))
    holdings = [share.holding() for share in rules.layout(alive, batch).shares if share.replica != dead]
    decision = rules.respond(FailureEvent(holdings, batch))
    return {share.replica for share in decision.shares if share.run}
