"""Replicas that are started while the job runs: on slots that a loss has left free, or that a host
brought.

Keys, under the prefix of the run:

    free/<host>     the free slots of a host; its agent adds slots, the agent that places a replica removes them
    anew/<rank>     the seats of a replica that was placed after the start, by the id of its first rank

Any agent places a replica as soon as living hosts have enough free slots. One transaction takes the
ids, writes the seats and removes the slots from the lists, so two agents never use a slot twice.
Each agent starts the ranks that sit on its host. When a replica loses a rank, the slots of its
other ranks become free, too: a new replica may take slots that several broken ones have left.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from recover.job.output import say
from recover.launch.hosts.placement import Seat, place
from recover.launch.hosts.slots import HostSlots
from recover.world.fabrics.base import NotAdmittedError
from recover.world.fabrics.etcd.agreement import ASKING, CLAIM, ENDED, declare, key_of, rank_of
from recover.world.fabrics.etcd.client import (
    Answer,
    EtcdClient,
    KeyValue,
    Operation,
    absent,
    delete,
    delete_all,
    get,
    get_all,
    present,
    put,
    unchanged_since,
    version_is,
)
from recover.world.fabrics.etcd.entry import NoRoomError, NotPlacedError, place_replica
from recover.world.fabrics.etcd.host_lease import HOST, PLACED

FREE, ANEW = "free/", "anew/"
MISSED = 2.0  # seconds after the grace of its lease, after which a host does not start what was placed there


@dataclass(frozen=True)
class RestartedReplica:
    """A replica that was placed after the start. `seats` are those of `ranks`, in this order."""

    ranks: tuple[int, ...]
    seats: tuple[Seat, ...]

    @classmethod
    def of(cls, found: KeyValue) -> RestartedReplica:
        first, seats = rank_of(found), tuple(Seat(*seat) for seat in json.loads(found.value))
        return cls(tuple(range(first, first + len(seats))), seats)

    def on(self, host: str) -> dict[int, int]:
        """Its ranks on a host, each with its slot."""
        pairs = zip(self.ranks, self.seats, strict=True)
        return {rank: seat.slot for rank, seat in pairs if seat.host == host}


class ReplicaRestarts:
    """The restarts as one agent takes part in them.

    `most`: number of ids; when they are used up, no replica is started any more. `heard` is called
    with every replica that was placed, before any of its processes is started.
    """

    def __init__(
        self,
        client: EtcdClient,
        host: str,
        slots: HostSlots,
        replica_size: int,
        most: int,
        heard: Callable[[RestartedReplica], object],
        patience: float,
    ) -> None:
        self._client, self._host, self._slots, self._size = client, host, slots, replica_size
        self._most, self._heard, self._patience = most, heard, patience
        self.known: dict[int, RestartedReplica] = {}  # by the first rank
        self.asked: set[int] = set()  # ranks of theirs that have asked to join
        self._missed: dict[str, float] = {}  # hosts without a lease, since when
        self.ended = False  # no replica is started any more
        self._is_full = False  # too few ids are left

    def look(self) -> bool:
        """Publish the free slots of this host, place a replica if one fits, and read what others
        have placed. Returns whether anything was written: then it is worth looking again at
        once."""
        firsts = sorted(self.known)
        claims = [get(key_of(CLAIM, first)) for first in firsts]
        answer = self._client.read(get_all(FREE), get_all(ANEW), get_all(HOST), get_all(ASKING), *claims)
        free, anew, hosts, asking = answer.found[:4]
        self.asked |= set(map(rank_of, asking))
        there = {found.key.removeprefix(HOST) for found in hosts}
        for found in anew:
            if (first := rank_of(found)) not in self.known:
                replica = RestartedReplica.of(found)
                self._heard(replica)
                for slot in replica.on(self._host).values():
                    self._slots.take(slot, time.monotonic())
                self.known[first] = replica
        self._forget([first for first, claim in zip(firsts, answer.found[4:], strict=True) if not claim])
        self._miss(there, answer.revision)
        if self.ended:
            return False
        return self._publish(free) or self._place(
            answer, {found.key.removeprefix(FREE): found for found in free}, there
        )

    def next_free_in(self) -> float:
        """Seconds until a resting slot of this host is free; infinity if none rests."""
        return self._slots.next_free_in(time.monotonic())

    def _publish(self, lists: Sequence[KeyValue]) -> bool:
        """Write the list of free slots if it has changed. Then nothing is placed before the next
        look."""
        key = f"{FREE}{self._host}"
        mine = next((found for found in lists if found.key == key), None)
        free = self._slots.free(time.monotonic())
        if free == (json.loads(mine.value) if mine else []):
            return False
        # The guard fails if an agent has taken a slot from the list since: the slot is then taken
        # here, too, once this agent has read that.
        writes = [put(key, json.dumps(free).encode())]
        self._client.txn([version_is(key, mine.version if mine else 0)], writes)
        return True

    def _place(self, answer: Answer, lists: Mapping[str, KeyValue], there: set[str]) -> bool:
        free = {host: json.loads(found.value) for host, found in sorted(lists.items()) if host in there}
        free = {host: slots for host, slots in free.items() if slots}
        seats = place({host: len(slots) for host, slots in free.items()}, self._size)[: self._size]
        if len(seats) < self._size or self._is_full:
            return False
        taken = [Seat(seat.host, free[seat.host].pop(0)) for seat in seats]
        hosts = sorted({seat.host for seat in taken})
        guards = [unchanged_since(FREE, answer.revision), *(present(f"{HOST}{host}") for host in hosts)]
        guards.append(absent(ENDED))
        writes = [put(f"{FREE}{host}", json.dumps(free[host]).encode()) for host in hosts]
        words = json.dumps([[seat.host, seat.slot] for seat in taken]).encode()

        def record(ranks: range) -> list[Operation]:
            return [*writes, put(key_of(ANEW, ranks[0]), words)]

        try:
            place_replica(self._client, self._most, guards, record)
        except NoRoomError:
            self._is_full = True
            say(
                f"no replica is started any more: of the {self._most} ids that ranks of a job may have, too few are "
                f"left for a replica of {self._size}; stop the job when it suits you (SIGTERM), and go on from its "
                "checkpoint"
            )
            return False
        except (NotPlacedError, NotAdmittedError):
            # Another agent was first, a host has gone, or the job has not begun.
            return False
        return True

    def _forget(self, firsts: list[int]) -> None:
        """Forget replicas whose claims the members have removed: no rank will join under these ids
        any more."""
        for first in firsts:
            self.asked -= set(self.known.pop(first).ranks)
            # Ids are never used twice, so doing it again, or late, does no harm.
            writes = [delete(key_of(ANEW, first)), delete_all(f"replica/{first // self._size}/")]
            self._client.txn([absent(key_of(CLAIM, first))], writes)

    def _miss(self, there: set[str], revision: int) -> None:
        """Declare ranks dead that were to be started on a host that has gone: the rest of their
        replica waits for them."""
        hosts = {seat.host for replica in self.known.values() for seat in replica.seats}
        now = time.monotonic()
        self._missed = {host: self._missed.get(host, now) for host in hosts - there}
        for host in (host for host, since in self._missed.items() if now - since > self._patience):
            for rank in (rank for replica in self.known.values() for rank in replica.on(host)):
                # The guards fail if a host of this name has registered since: it may be without a
                # lease for a moment, too.
                guards = absent(f"{HOST}{host}"), unchanged_since(f"{PLACED}{host}", revision)
                declare(self._client, rank, f"host {host} has gone", *guards)
