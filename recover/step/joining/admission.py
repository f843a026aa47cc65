"""A replica joins between two steps: it is admitted, given the state of the others, and counted from there on.

The members come here together when the step before was committed with somebody asking; who asks comes from outside. One
repair admits whoever all members see asking, and finds who has died. Then every member passes its part of the state on,
and one agreement says that all of it has arrived. Not before that is anything expected of a newcomer. A death in
any of this is a death like any other: the others repair, and whoever is still without the state is given it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from recover.step.incident import Incident, met
from recover.step.record import Arrival
from recover.world.census import Census
from recover.world.membership import Phase

if TYPE_CHECKING:
    from recover.step.transaction import Transaction

# Who holds the state and who is to get it, as ranks: passes this rank's part on, or takes it. How many bytes it was, or
# None if that went wrong here.
PassOn = Callable[[tuple[int, ...], tuple[int, ...]], int | None]
NOT_TAKEN = "it joined, and could not take the state that it was given (its log says why)"
TRIES = 3  # to take the state, that fail although nobody dies: then the others go on without that newcomer


class NobodyHoldsTheStateError(RuntimeError):
    """All who could have passed the state on have died."""


def take_in(transaction: Transaction, pass_on: PassOn) -> list[Incident]:
    """For members, at the beginning of a step; call `transaction.begin` again afterwards. What has happened."""
    transaction.asked = False
    return _settle(transaction, lambda record: transaction.world.repair(record, admit=True), pass_on)


def enter(transaction: Transaction, arrival: Arrival, pass_on: PassOn) -> list[Incident]:
    """For one that joins: wait until it is admitted, and take the state."""
    transaction.arrival = arrival
    incidents = _settle(transaction, transaction.world.join, pass_on)
    transaction.arrival = None
    return incidents


def _settle(transaction: Transaction, begin: Callable[[bytes], Census], pass_on: PassOn) -> list[Incident]:
    world, started = transaction.world, time.time()
    incidents: list[Incident] = []
    census, lost, evicted = transaction.repair(begin)
    if transaction.arrival is not None:
        started = time.time() - census.seconds  # it has waited for as long as it liked
    while True:
        incident = met(transaction.index, world.grid, census, lost, evicted, started)
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
            return _told(transaction, incidents + [incident] * bool(lost))
        if not lost and (unlucky := frozenset(r for r, a in arrivals.items() if a.failures >= TRIES)):
            reasons = dict.fromkeys(world.grid.replicas_of(unlucky), NOT_TAKEN)
            without_them = partial(world.repair, evict=unlucky, reasons=reasons)
            census, lost, evicted = transaction.repair(without_them)
            evicted |= reasons
            continue
        world.arrivals = world.grid.replicas_of(arrivals)
        world.hooks("repair", "state")
        began = time.perf_counter()
        nbytes = pass_on(givers, tuple(sorted(arrivals)))
        world.hooks("repair", "arrived")
        agreed, world.arrivals = world.agree(nbytes is not None, Phase.VOTE), ()
        if agreed == 1:
            incident.joined_ranks = tuple(sorted(arrivals))
            incident.joined_replicas = world.grid.replicas_of(arrivals)
            incident.hosts = tuple(sorted({arrival.host for arrival in arrivals.values()}))
            incident.warm_up_ms = max(arrival.warm_up for arrival in arrivals.values()) * 1e3
            incident.transfer_ms = (time.perf_counter() - began) * 1e3
            incident.transfer_bytes = nbytes or 0
            incident.stall_ms = (time.time() - started) * 1e3
            transaction.newcomers = transaction.index, incident.joined_replicas
            if transaction.arrival is not None:
                transaction.seniority.join(transaction.index)
            transaction.totals.seat(world.replicas)
            return _told(transaction, [*incidents, incident])
        incidents += [incident] * bool(lost)
        if transaction.arrival is not None:
            failures = 1 if lost else transaction.arrival.failures + 1
            transaction.arrival = replace(transaction.arrival, failures=failures)
        census, lost, evicted = transaction.repair()


def _told(transaction: Transaction, incidents: list[Incident]) -> list[Incident]:
    """All of the step that begins now: one that joins has known its number from the state only."""
    for incident in incidents:
        incident.step = transaction.index
    return incidents
