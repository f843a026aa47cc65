"""Placement of ranks on hosts: a replica on as few hosts as possible, so that a lost host costs few
replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """The place of a rank: its host, and its slot there."""

    host: str
    slot: int


def place(slots: Mapping[str, int], replica_size: int) -> tuple[Seat, ...]:
    """The seats of all ranks, in their order, on hosts with these numbers of slots, in the order
    given.

    First each host gets whole replicas. Slots that are left are combined to replicas that lie on
    several hosts, the hosts with most of them first. Slots that make no whole replica stay empty.
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
