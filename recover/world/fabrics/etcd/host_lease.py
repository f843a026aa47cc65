"""Hosts in etcd: whoever starts the ranks of one holds a lease for all of them, and the ranks see when it is gone.

A lease that has gone is no proof: a member of etcd that was paused and comes back may revoke those of living hosts. So
the others wait for a grace before they declare the ranks of such a host dead, all at once, and meanwhile its holder may
get a new one, unless it is too late. That etcd is silent is no reason for either to do anything.

What users call a lease is all of it, etcd's and the grace: about so long after its last sign a host is dead to all.

A key of its own holds the id of the agent that has placed a host's ranks, for as long as they are placed. An agent that
was stopped for so long that its host was given up may find a successor of the same name there when it wakes: all that
it writes is guarded by its id, so it changes nothing, and ends.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from recover.job.host_options import LEASE
from recover.job.output import say
from recover.world.fabrics.etcd.agreement import DEAD, key_of
from recover.world.fabrics.etcd.client import (
    EtcdClient,
    EtcdError,
    KeyValue,
    Operation,
    absent,
    delete,
    either,
    get,
    put,
    value_is,
    version_is,
)

HOST, PLACED, AGENT = "seen/host/", "seen/placed/", "seen/agent/"
EXPIRY = 0.5  # seconds between two looks of etcd at what has run out
KEEP = 0.15  # seconds between two requests to keep a lease: one that was revoked must be renewed within the grace
KEEPERS = 8  # of these that may be under way: on a bad cable, or a busy machine, one may take seconds
LEAST_GRACE = 0.5  # seconds: three requests to keep a lease, and an answer
LOOK = 0.1  # seconds between two looks at the hosts that seem lost
MOST_RANKS = 120  # of one host: etcd takes 128 operations in a transaction


def parts_of(lease: float) -> tuple[int, float]:
    """Of so many seconds without a sign: those of the lease in etcd, which counts whole ones, and the grace."""
    ttl = max(1, int(min(lease * 0.7, lease - EXPIRY - LEAST_GRACE)))
    return ttl, lease - EXPIRY - ttl


TTL, GRACE = parts_of(LEASE)


def without_lease(host: str) -> str:
    """Why its ranks are dead."""
    return f"host {host} has lost its lease"


def held_by(host: str, agent: str) -> list[Operation]:
    """The ranks of the host were placed by this agent. (Values are sealed, and can be compared as a whole only.)"""
    return [value_is(f"{AGENT}{host}", agent.encode())]


def _holder(value: bytes) -> str:
    return value.decode().partition(" ")[0]


class HostLease:
    """Held by the process that starts a host's ranks. `lost` is called if the others have given the host up. `agent`:
    an id that no other process has."""

    def __init__(
        self,
        client: EtcdClient,
        name: str,
        ranks: Sequence[int],
        ttl: float = TTL,
        lost: Callable[[], None] = lambda: None,
        agent: str = "",
    ) -> None:
        if "/" in name or not name:
            raise ValueError(f"host {name!r}: give a name without /")
        self.name, self._agent = name, agent or secrets.token_hex(8)
        self._host, self._placed, self._by = f"{HOST}{name}", f"{PLACED}{name}", f"{AGENT}{name}"
        self.ranks = self._checked(ranks)
        self._client, self._ttl, self._lost = client, ttl, lost
        self._lease, self._placings = 0, 1
        self.granted = 0  # seconds; etcd may grant no lease as short as it was asked for
        self._asked, self._asking = 0.0, threading.Lock()  # when a keeper went to etcd for the last time
        self._left = threading.Event()
        self._ending = threading.Lock()
        self._threads = [
            threading.Thread(target=self._keep, args=[n], name=f"recover-etcd-lease-{n}", daemon=True)
            for n in range(KEEPERS)
        ]

    def start(self) -> None:
        """Register the host. From here on its ranks may vote."""
        self._lease, self.granted = self._client.grant(self._ttl)
        bound = self._bound_to(self._lease)
        writes = [put(self._placed, self._placing(self.ranks)), put(self._by, self._agent.encode())]
        writes.append(put(self._host, bound, self._lease))
        # One of this name that was lost while it had no ranks was missed by nobody.
        there = self._client.get(self._placed)
        if there is not None and not _ranks_in(there.value):
            guards = [value_is(self._placed, there.value), absent(self._host)]
            self._client.txn(guards, [delete(self._placed), delete(self._by)])
        answer = self._client.txn([absent(self._placed)], writes, [get(self._host)])
        # The answer to a first try may have been lost.
        if not answer.succeeded and [found.value for found in answer.found[0]] != [bound]:
            raise ValueError(f"a host {self.name!r} is in this job already; give each host a name of its own")
        for thread in self._threads:
            thread.start()

    def guards(self) -> list[Operation]:
        """They hold while this agent holds its host, and fail once the host was given up or has a successor."""
        return held_by(self.name, self._agent)

    def place(self, ranks: Sequence[int]) -> bool:
        """These are the host's ranks from now on: new ones before they start, without those that have ended. False if
        the host was given up: its holder is told."""
        ranks = self._checked(ranks)
        value = self._placing(ranks)
        while True:
            guards = [*self.guards(), version_is(self._placed, self._placings)]
            answer = self._client.txn(guards, [put(self._placed, value)], [get(self._placed)])
            if answer.succeeded:
                self._placings += 1
                break
            there = [found for found in answer.found[0] if _holder(found.value) == self._agent]
            if not there:
                self._give_up()
                return False
            self._placings = there[0].version  # the answer to an earlier try was lost
            if there[0].value == value:
                break
        self.ranks = ranks
        return True

    def _placing(self, ranks: Sequence[int]) -> bytes:
        return f"{self._agent} {json.dumps(list(ranks))}".encode()

    def _bound_to(self, lease: int) -> bytes:
        return f"{self._agent} {lease}".encode()

    def _checked(self, ranks: Sequence[int]) -> tuple[int, ...]:
        if len(ranks) > MOST_RANKS:
            raise ValueError(f"host {self.name!r} with {len(ranks)} ranks; etcd takes {MOST_RANKS} at most")
        return tuple(ranks)

    def abandon(self) -> None:
        """Its ranks have ended, and not all of them may know: let it run out, so that the others miss it."""
        self._left.set()

    def leave(self) -> None:
        """All its ranks have ended, and were declared dead or have finished: nobody need miss it."""
        self._left.set()
        for thread in self._threads:
            if thread.is_alive():  # not even begun, where etcd has refused the lease
                thread.join()
        self._client.txn(self.guards(), [delete(key) for key in (self._placed, self._by, self._host)])
        try:
            self._client.revoke(self._lease)
        except EtcdError:
            pass  # it has run out

    def _keep(self, keeper: int) -> None:
        for _ in range(keeper):
            self._client.go_on()  # each begins with another member
        while not self._left.wait(max(0.0, self._asked + KEEP - time.monotonic())):
            if not self._my_turn():
                continue
            try:
                if not self._client.keep_alive(self._lease) and not self._registered_anew():
                    self._give_up()
            except EtcdError:
                pass  # without etcd nobody can agree on anything, and when it is back leases count from the start
            except Exception as error:  # a keeper that ends is one fewer, and without any the host is lost
                say(f"the lease of host {self.name} could not be kept: {type(error).__name__}: {error}")

    def _my_turn(self) -> bool:
        """One of the keepers that wait for no answer goes, every so often."""
        with self._asking:
            now = time.monotonic()
            turn = now - self._asked >= KEEP
            if turn:
                self._asked = now
            return turn

    def _registered_anew(self) -> bool:
        """By the first keeper that gets through. False if the others have given this host up."""
        lease, _ = self._client.grant(self._ttl)
        guards, look = [*self.guards(), absent(self._host)], [get(self._placed), get(self._host)]
        answer = self._client.txn(guards, [put(self._host, self._bound_to(lease), lease), *look], look)
        there, bound = ([_holder(found.value) == self._agent for found in one] for one in answer.found)
        if all(bound) and bound:  # by this keeper, or by another one of ours
            self._lease = int(answer.found[1][0].value.split()[1])
        return any(there)

    def _give_up(self) -> None:
        with self._ending:
            if not self._left.is_set():
                self._left.set()
                self._lost()


class HostsSeen:
    """A rank's view of the hosts. Those whose lease stays away are declared dead, with all their ranks."""

    def __init__(self, client: EtcdClient, grace: float = GRACE) -> None:
        self._client, self._grace = client, grace
        self._lock = threading.Lock()
        self._placed: dict[str, tuple[int, ...]] = {}
        self._agents: dict[str, str] = {}
        self._leased: set[str] = set()
        self._missed: dict[str, float] = {}  # since when
        self._stopped, self._alarm = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="recover-etcd-hosts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._alarm.set()

    def apply(self, changes: Iterable[KeyValue]) -> None:
        about_hosts = [found for found in changes if found.key.startswith((PLACED, HOST))]
        if not about_hosts:
            return  # nearly always: a decision
        with self._lock:
            for found in about_hosts:
                if found.key.startswith(PLACED):
                    host = found.key.removeprefix(PLACED)
                    self._placed[host] = _ranks_in(found.value) if found.version else ()
                    self._agents[host] = _holder(found.value)
                else:
                    host = found.key.removeprefix(HOST)
                    (self._leased.add if found.version else self._leased.discard)(host)
            lost = {host for host, ranks in self._placed.items() if ranks and host not in self._leased}
            now = time.monotonic()
            self._missed = {host: self._missed.get(host, now) for host in lost}
        if lost:
            self._alarm.set()

    def missed(self) -> frozenset[int]:
        """The ranks of hosts whose lease is gone just now."""
        with self._lock:
            return frozenset(rank for host in self._missed for rank in self._placed[host])

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._stopped.wait(LOOK):
            now = time.monotonic()
            with self._lock:
                calm = not self._missed
                if calm:
                    self._alarm.clear()
            if calm:  # nearly always, and there may be many ranks on a host
                self._alarm.wait()
                looked = time.monotonic()
                continue
            with self._lock:
                if now - looked > self._grace:  # this process has slept, and its news with it
                    self._missed = dict.fromkeys(self._missed, now)
                due = [host for host, since in self._missed.items() if now - since > self._grace]
                ranks = {host: (self._placed[host], self._agents[host]) for host in due}
            for host in due:
                try:
                    self._declare(host, *ranks[host])
                except EtcdError:
                    pass  # once etcd is back
            looked = time.monotonic()

    def _declare(self, host: str, ranks: Sequence[int], agent: str) -> None:
        """All its ranks at once, unless it has come back, or somebody else was faster, or has come in its place."""
        why = without_lease(host).encode()
        deaths = [either([absent(key)], [put(key, why)]) for key in (key_of(DEAD, rank) for rank in ranks)]
        guards = [absent(f"{HOST}{host}"), *held_by(host, agent)]
        self._client.txn(guards, [delete(f"{PLACED}{host}"), delete(f"{AGENT}{host}"), *deaths])


def _ranks_in(placed: bytes) -> tuple[int, ...]:
    return tuple(json.loads(placed.decode().partition(" ")[2]))
