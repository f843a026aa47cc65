"""A replica joins between two steps: it is admitted, receives the state of the members, and is a
member from then on.

All members enter the admission together, at the beginning of a step, after a vote in which all
of them saw a replica ask; the joining replica enters it from outside. One repair admits every
replica that all members see asking, and finds deaths. Then every member sends its part of the
state, and one agreement confirms that all of it has arrived. Only after that agreement is
anything expected of a joining replica. A death in between is an ordinary death: the others
repair, and every joining replica that is still without the state receives it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from recover.step.incident import Incident, incident_of
from recover.step.record import Arrival
from recover.world.census import Census
from recover.world.membership import Phase

if TYPE_CHECKING:
    from recover.step.transaction import Transaction

# Called with the ranks that hold the state and the ranks that receive it: sends this rank's part,
# or receives. Returns the number of bytes, or None if it failed here.
PassOn = Callable[[tuple[int, ...], tuple[int, ...]], int | None]
NOT_TAKEN = "it joined, and could not take the state that it was given (its log says why)"
# Failed transfers in a row without a death, after which the members go on without the joining
# replica.
TRIES = 3


class NobodyHoldsTheStateError(RuntimeError):
    """All ranks that held the state have died."""


def admit_replicas(transaction: Transaction, pass_on: PassOn) -> list[Incident]:
    """Members call this at the beginning of a step, and `transaction.begin` again afterwards.
    Returns the incidents."""
    return _admit_and_transfer(
        transaction, lambda record: transaction.world.repair(record, admit=True), pass_on, None
    )


def join_members(transaction: Transaction, arrival: Arrival, pass_on: PassOn) -> list[Incident]:
    """A joining replica calls this: it waits until it is admitted, and receives the state.
    Returns the incidents."""
    return _admit_and_transfer(transaction, transaction.world.join, pass_on, arrival)


def _admit_and_transfer(
    transaction: Transaction, begin: Callable[[bytes], Census], pass_on: PassOn, own: Arrival | None
) -> list[Incident]:
    """`own`: the record of this rank if it joins. It replaces the record of a member in every
    repair until the agreement below: a rank that holds only a part of the state must not be
    counted among those that can pass it on."""
    world, started = transaction.world, time.time()
    incidents: list[Incident] = []
    census, lost, evicted = transaction.repair(begin, own)
    if own is not None:
        started = time.time() - census.seconds  # without the time that it waited to be admitted
    while True:
        incident = incident_of(transaction.index, world.grid, census, lost, evicted, started)
        arrivals = {
            rank: Arrival.from_bytes(data) for rank, data in census.records.items() if Arrival.is_in(data)
        }
        givers = tuple(rank for rank in census.members if rank not in arrivals)
        if not givers:
            raise NobodyHoldsTheStateError(
                "all who held the state have died before it was passed on to those who joined; go on from the last "
                "checkpoint"
            )
        if not arrivals:
            return _with_step(transaction, incidents + [incident] * bool(lost))
        if not lost and (failing := frozenset(r for r, a in arrivals.items() if a.failures >= TRIES)):
            reasons = dict.fromkeys(world.grid.replicas_of(failing), NOT_TAKEN)
            without_them = partial(world.repair, evict=failing, reasons=reasons)
            census, lost, evicted = transaction.repair(without_them, own)
            evicted |= reasons
            continue
        world.arrivals = world.grid.replicas_of(arrivals)
        world.hooks("repair", "state")
        began = time.perf_counter()
        nbytes = pass_on(givers, tuple(sorted(arrivals)))
        world.hooks("repair", "arrived")
        agreed, world.arrivals = world.agree(nbytes is not None, Phase.VOTE), ()
        if agreed == 1:
            _note_join(incident, arrivals, world.grid.replicas_of(arrivals))
            incident.transfer_ms = (time.perf_counter() - began) * 1e3
            incident.transfer_bytes = nbytes or 0
            incident.stall_ms = (time.time() - started) * 1e3
            transaction.members_joined(incident.joined_replicas, as_newcomer=own is not None)
            return _with_step(transaction, [*incidents, incident])
        incidents += [incident] * bool(lost)
        if own is not None:
            own = replace(own, failures=1 if lost else own.failures + 1)
        census, lost, evicted = transaction.repair(arrival=own)


def _note_join(incident: Incident, arrivals: dict[int, Arrival], replicas: tuple[int, ...]) -> None:
    incident.joined_ranks, incident.joined_replicas = tuple(sorted(arrivals)), replicas
    incident.hosts = tuple(sorted({arrival.host for arrival in arrivals.values()}))
    incident.warm_up_ms = max(arrival.warm_up for arrival in arrivals.values()) * 1e3


def _with_step(transaction: Transaction, incidents: list[Incident]) -> list[Incident]:
    """All belong to the step that begins now. A joining replica has learned its number only from
    the state."""
    for incident in incidents:
        incident.step = transaction.index
    return incidents
