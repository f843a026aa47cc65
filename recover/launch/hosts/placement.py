"""Which rank sits where: a replica on as few hosts as possible, so that a lost host costs as few as it can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """Of one rank: its host, and its number among the ranks there."""

    host: str
    slot: int


def place(slots: Mapping[str, int], replica_size: int) -> tuple[Seat, ...]:
    """The seats of all ranks, in order, for hosts with so many slots each, in the order given.

    Whole replicas go first, each onto one host. What is left over on the hosts is put together to replicas that lie on
    several, the largest remainders first. Slots that make no whole replica stay empty.
    """
    free = dict(slots)
    used = dict.fromkeys(slots, 0)
    replicas: list[list[str]] = []
    for host in slots:
        while free[host] >= replica_size:
            replicas.append([host] * replica_size)
            free[host] -= replica_size
    order = {host: number for number, host in enumerate(slots)}
    while sum(free.values()) >= replica_size:
        replica: list[str] = []
        for host in sorted(free, key=lambda host: (-free[host], order[host])):
            taken = min(free[host], replica_size - len(replica))
            replica += [host] * taken
            free[host] -= taken
        replicas.append(sorted(replica, key=order.__getitem__))
    seats = []
    for host in (host for replica in replicas for host in replica):
        seats.append(Seat(host, used[host]))
        used[host] += 1
    return tuple(seats)


def across(seats: tuple[Seat, ...], replica_size: int) -> tuple[int, ...]:
    """The replicas that lie on several hosts."""
    return tuple(
        replica
        for replica in range(len(seats) // replica_size)
        if len({seat.host for seat in seats[replica * replica_size : (replica + 1) * replica_size]}) > 1
    )
