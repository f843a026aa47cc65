"""Deaths during a join: stage x place x victim, one after the other, on replicas that are really killed and joined.

A replica joins in every event, and a replica dies meanwhile: the joining replica, the first member (which announces
the state, and writes) or another one. The members that are left pass the state on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from joining_ranks import JoiningRanks
from patience import wait_until

from recover.faults.locations import (
    IN_INSTALMENTS,
    JOIN_PHASES,
    LOCATIONS,
    OF_MICROBATCHES,
    OUTSIDE,
    REPAIR_PHASES,
    VERIFIED,
)

STEP_PLACES = tuple(
    place
    for place in LOCATIONS
    if place not in ("repair", "extra", "checkpoint", *OUTSIDE, *IN_INSTALMENTS, *VERIFIED)
)  # a checkpoint is the trainer's, and nothing is verified here
MEMBERS, EVERYBODY = ("first", "other"), ("newcomer", "first", "other")
PENDING, ADMITTED, TRANSFER, FIRST_STEP = "pending", "being admitted", "in transfer", "in its first step"
BETWEEN = "between instalments"
AT_WORK = 3  # members before each event


@dataclass(frozen=True)
class Cell:
    stage: str
    place: str
    who: str


def all_cells() -> list[Cell]:
    cells = [
        *(Cell(ADMITTED, f"repair:{phase}", who) for phase, who in product(REPAIR_PHASES, EVERYBODY)),
        *(Cell(TRANSFER, f"repair:{phase}", who) for phase, who in product(JOIN_PHASES, EVERYBODY)),
        # A joining replica computes no microbatch in its first step.
        *(
            Cell(FIRST_STEP, place, who)
            for place, who in product(STEP_PLACES, EVERYBODY)
            if who != "newcomer" or place not in OF_MICROBATCHES
        ),
        # Inside the repair of another loss in that step, and in the work that it calls for.
        *(Cell(FIRST_STEP, f"repair:{phase}", "newcomer") for phase in REPAIR_PHASES),
        Cell(FIRST_STEP, "extra", "first"),
        *(Cell(PENDING, place, "newcomer") for place in OUTSIDE),
        *(Cell(PENDING, place, who) for place, who in product(STEP_PLACES, MEMBERS)),
    ]
    return cells


def cells_of_instalments() -> list[Cell]:
    """While the state is sent with the steps: the joining replica takes part in these, and the first member sends."""
    places = (*IN_INSTALMENTS, "bucket", "in-reduce", "in-totals", "vote", "update", "after-update")
    return [
        *(Cell(BETWEEN, place, "newcomer") for place in places),
        *(Cell(BETWEEN, place, "first") for place in IN_INSTALMENTS),
    ]


@dataclass
class Event:
    """One replica that joins, and the ranks that die meanwhile."""

    cell: Cell
    newcomer: int
    victims: tuple[int, ...]
    left: tuple[int, ...]  # replicas that are at work afterwards
    faults: list[str] = field(default_factory=list)


def lay_out(cells: Iterable[Cell], replica_size: int) -> list[Event]:
    """One event after the other. The victims are known beforehand, since numbers are never used twice."""
    alive, following = list(range(AT_WORK)), AT_WORK
    events: list[Event] = []
    for cell in cells:
        while len(alive) < AT_WORK:  # a replica joins undisturbed
            events.append(Event(Cell("", "", ""), following, (), (*alive, following)))
            alive.append(following)
            following += 1
        newcomer, following = following, following + 1
        victim = {"newcomer": newcomer, "first": min(alive), "other": max(alive)}[cell.who]
        local = len(events) % replica_size
        when = f"{newcomer}{'joined' if cell.stage == FIRST_STEP else 'asks'}"
        deaths = [(victim, cell.place)]
        if cell.stage == FIRST_STEP and cell.place.partition(":")[0] in ("repair", "extra"):
            deaths.append((sorted(alive)[1], "in-reduce"))
        faults = [f"{when}:{replica}.{local}:{place}" for replica, place in deaths]
        victims = tuple(replica for replica, _ in deaths)
        alive = [replica for replica in (*alive, newcomer) if replica not in victims]
        events.append(Event(cell, newcomer, victims, tuple(alive), faults))
    return events


def faults_of(events: Sequence[Event]) -> list[str]:
    return [fault for event in events for fault in event.faults]


def play(ranks: JoiningRanks, event: Event) -> bool:
    """Let it happen. False if the replica was in before any rank came to that place: it asks for a moment only."""
    size = ranks.replica_size

    def is_gone(replica: int) -> bool:
        members = range(replica * size, (replica + 1) * size)
        started = [ranks.diary(rank, "started") for rank in members]
        return all(lines and not _lives(lines[0]["pid"]) for lines in started)

    def settled() -> bool:
        committed = ranks.diary(event.left[0] * size)
        return (
            all(is_gone(replica) for replica in event.victims)
            and bool(committed)
            and committed[-1]["replicas"] == sorted(event.left)
        )

    def missed() -> bool:
        """The joined replica has worked for some steps, and no rank has died."""
        return event.cell.stage == PENDING and len(ranks.diary(event.newcomer * size)) > 3

    came = ranks.start_another()
    assert came[0] == event.newcomer * size
    if not wait_until(lambda: settled() or missed()):
        ranks.write_stacks()
        raise AssertionError(f"{event}: {ranks.diary(event.left[0] * size)[-1:]}; see ranks/*.stack")
    return settled()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
