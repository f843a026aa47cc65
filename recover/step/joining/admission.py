"""Members admit replicas that ask to join, and hand them the state: in one pause between two steps,
or in instalments over several steps.

All members enter the admission together, at the beginning of a step, after a vote in which all
of them saw a replica ask. One repair admits every replica that all members see asking, and finds
deaths. Afterwards a joining replica is in the group, and follows the commands of the members
(`recover.step.joining.joining_rank`). In one pause, every member sends its part of the state at
once. In instalments, the members go on with their steps, give it a part of the state with each
attempt, and the rest once it has all that changes only in updates. Either way one agreement confirms
that all has arrived; only after it is the joining replica a member. A death in between is an
ordinary death: the others repair, and every joining replica that lives is given what it lacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from recover.step.incident import Incident, Losses, incident_of
from recover.step.record import Arrival, arrivals_of
from recover.step.transaction import Transaction
from recover.world.census import Census
from recover.world.membership import Phase

# Called with the ranks that hold the state, the ranks that receive it, and what is sent to the latter with
# it (the incidents): sends this rank's part. Returns the number of bytes, or None if it failed here.
PassOn = Callable[[tuple[int, ...], tuple[int, ...], Mapping[str, Any]], int | None]


def admit_replicas(transaction: Transaction, pass_on: PassOn) -> list[Incident]:
    """Admit replicas and hand over the state in one pause. Members call this at the beginning of a
    step, and `transaction.begin` again afterwards. Returns the incidents."""
    started = time.time()
    return _hand_over(transaction, pass_on, started, *_admit(transaction))


def begin_join(transaction: Transaction) -> list[Incident]:
    """Admit replicas to the group only: their state follows in instalments. Called as
    `admit_replicas` is."""
    started = time.time()
    census, losses = _admit(transaction)
    incident = incident_of(transaction.index, transaction.world.grid, census, losses, started)
    return [incident] * bool(losses)


def complete_join(transaction: Transaction, pass_on: PassOn) -> list[Incident]:
    """Hand over the rest of the state to the replicas that are in the group. Called as
    `admit_replicas` is."""
    census = replace(transaction.world.last_census, seconds=0.0)  # the repair belongs to an earlier incident
    return _hand_over(transaction, pass_on, time.time(), census, Losses())


def _admit(transaction: Transaction) -> tuple[Census, Losses]:
    return transaction.repair(lambda record: transaction.world.repair(record, admit=True))


def _hand_over(
    transaction: Transaction, pass_on: PassOn, started: float, census: Census, losses: Losses
) -> list[Incident]:
    world = transaction.world
    incidents: list[Incident] = []
    while True:
        incident = incident_of(transaction.index, world.grid, census, losses, started)
        arrivals = arrivals_of(census.records)
        if not arrivals:
            return incidents + [incident] * bool(losses)
        _note_join(incident, arrivals, world.grid.replicas_of(arrivals))
        world.hooks("repair", "state")
        began = time.perf_counter()
        told = {"incidents": [each.to_json() for each in (*incidents, incident)]}
        nbytes = pass_on(world.members, tuple(sorted(arrivals)), told)
        world.hooks("repair", "arrived")
        if world.agree(nbytes is not None, Phase.VOTE) == 1:
            incident.transfer_ms = (time.perf_counter() - began) * 1e3
            incident.transfer_bytes = nbytes or 0
            incident.stall_ms = (time.time() - started) * 1e3
            world.complete_arrivals()
            transaction.members_joined(incident.joined_replicas, as_joining=False)
            return [*incidents, incident]
        incident.joined_ranks = incident.joined_replicas = incident.hosts = ()
        incidents += [incident] * bool(losses)
        census, losses = transaction.repair()


def _note_join(incident: Incident, arrivals: Mapping[int, Arrival], replicas: tuple[int, ...]) -> None:
    incident.joined_ranks, incident.joined_replicas = tuple(sorted(arrivals)), replicas
    incident.hosts = tuple(sorted({arrival.host for arrival in arrivals.values()}))
    incident.warm_up_ms = max(arrival.warm_up for arrival in arrivals.values()) * 1e3
