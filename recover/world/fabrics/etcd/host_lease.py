"""Hosts in etcd: the agent of a host holds a lease for all its ranks, and all ranks notice when it
expires.

An expired lease is no proof: a member of etcd that was paused may revoke leases of living hosts
when it resumes. So the ranks wait for a grace period before they declare the ranks of such a host
dead, all at once. Meanwhile its agent may register a new lease. While etcd is silent, neither side
does anything.

The lease that users set is the sum of both, etcd's lease and the grace: a host counts as dead on
all ranks about that long after its last sign of life.

A key of its own holds the id of the agent that has placed a host's ranks, for as long as they are
placed. An agent that was stopped until its host was declared dead may find a successor of the same
name when it resumes: all its writes are guarded by its id, so it changes nothing, and ends.
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
# By host: the ranks that it had when it was lost last. The reasons of deaths are removed once all
# members know of the deaths, and a slow agent may read them later than that.
LOST = "lost/"
EXPIRY = 0.5  # seconds between two checks of etcd for expired leases
KEEP = 0.15  # seconds between two keep-alive requests: a revoked lease must be replaced within the grace
KEEPERS = 8  # requests that may be under way: on a bad network, or a busy machine, one may take seconds
LEAST_GRACE = 0.5  # seconds: three keep-alive requests, and an answer
LOOK = 0.1  # seconds between two checks of hosts without a lease
MOST_RANKS = 120  # of one host: etcd takes 128 operations in a transaction


def parts_of(lease: float) -> tuple[int, float]:
    """Split the seconds of a lease into etcd's, which counts whole ones, and the grace."""
    ttl = max(1, int(min(lease * 0.7, lease - EXPIRY - LEAST_GRACE)))
    return ttl, lease - EXPIRY - ttl


TTL, GRACE = parts_of(LEASE)


def without_lease(host: str) -> str:
    """The reason for the deaths of the ranks of a host that has lost its lease."""
    return f"host {host} has lost its lease"


def held_by(host: str, agent: str) -> list[Operation]:
    """Guards: this agent has placed the ranks of the host.

    (Sealed values can be compared as a whole only.)
    """
    return [value_is(f"{AGENT}{host}", agent.encode())]


def _holder(value: bytes) -> str:
    return value.decode().partition(" ")[0]


class HostLease:
    """The lease of a host, held by its agent.

    `lost` is called if the host was declared dead. `agent`: a unique id of the process.
    """

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
        self.granted = 0  # seconds; etcd may grant a longer lease than it was asked for
        self._asked, self._asking = 0.0, threading.Lock()  # when a keeper sent the last request
        self._left = threading.Event()
        self._ending = threading.Lock()
        self._threads = [
            threading.Thread(target=self._keep, args=[n], name=f"recover-etcd-lease-{n}", daemon=True)
            for n in range(KEEPERS)
        ]

    def start(self) -> None:
        """Register the host. Its ranks may vote afterwards.

        The lease is granted before the keys are written: a key without a lease would belong to a
        host that never expires.
        """
        self._lease, self.granted = self._client.grant(self._ttl)
        bound = self._bound_to(self._lease)
        writes = [put(self._placed, self._placing(self.ranks)), put(self._by, self._agent.encode())]
        writes.append(put(self._host, bound, self._lease))
        # A host of this name that was lost while it had no ranks was never declared dead: remove
        # its keys.
        there = self._client.get(self._placed)
        if there is not None and not _ranks_in(there.value):
            guards = [value_is(self._placed, there.value), absent(self._host)]
            self._client.txn(guards, [delete(self._placed), delete(self._by)])
        answer = self._client.txn([absent(self._placed)], writes, [get(self._host)])
        # The answer to an earlier attempt may have been lost.
        if not answer.succeeded and [found.value for found in answer.found[0]] != [bound]:
            raise ValueError(f"a host {self.name!r} is in this job already; give each host a name of its own")
        for thread in self._threads:
            thread.start()

    def guards(self) -> list[Operation]:
        """Guards that fail once the host was declared dead or has a successor."""
        return held_by(self.name, self._agent)

    def place(self, ranks: Sequence[int]) -> bool:
        """Set the host's ranks: new ones before they start, without those that have ended.

        False if the host was declared dead: then `lost` is called.
        """
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
            self._placings = there[0].version  # the answer to an earlier attempt was lost
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
        """Let the lease expire: its ranks have ended, and the others must declare them dead."""
        self._left.set()

    def leave(self) -> None:
        """Remove the host: all its ranks have finished, or were declared dead."""
        self._left.set()
        for thread in self._threads:
            if thread.is_alive():  # not started, if etcd has refused the lease
                thread.join()
        self._client.txn(self.guards(), [delete(key) for key in (self._placed, self._by, self._host)])
        try:
            self._client.revoke(self._lease)
        except EtcdError:
            pass  # it has expired

    def _keep(self, keeper: int) -> None:
        for _ in range(keeper):
            self._client.go_on()  # each keeper begins with another member
        while not self._left.wait(max(0.0, self._asked + KEEP - time.monotonic())):
            if not self._my_turn():
                continue
            try:
                if not self._client.keep_alive(self._lease) and not self._registered_anew():
                    self._give_up()
            except EtcdError:
                pass  # without etcd no agreement completes, and leases count from zero when etcd is back
            except Exception as error:  # a keeper must not end: without any the host is lost
                say(f"the lease of host {self.name} could not be kept: {type(error).__name__}: {error}")

    def _my_turn(self) -> bool:
        """Whether this keeper sends the next request: one keeper does every KEEP seconds, the first
        that waits for no answer."""
        with self._asking:
            now = time.monotonic()
            turn = now - self._asked >= KEEP
            if turn:
                self._asked = now
            return turn

    def _registered_anew(self) -> bool:
        """Register a new lease, by the first keeper that reaches etcd.

        False if the host was declared dead.
        """
        lease, _ = self._client.grant(self._ttl)
        guards, look = [*self.guards(), absent(self._host)], [get(self._placed), get(self._host)]
        answer = self._client.txn(guards, [put(self._host, self._bound_to(lease), lease), *look], look)
        there, bound = ([_holder(found.value) == self._agent for found in one] for one in answer.found)
        if all(bound) and bound:  # registered by this keeper, or by another one of this agent
            self._lease = int(answer.found[1][0].value.split()[1])
        return any(there)

    def _give_up(self) -> None:
        with self._ending:
            if not self._left.is_set():
                self._left.set()
                self._lost()


class HostLeases:
    """A rank's view of the hosts.

    Declares a host dead, with all its ranks, once it has had no lease for the grace period.
    """

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
            return  # nearly always: the change is a decision
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
        """The ranks of hosts that have no lease at present."""
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
            if calm:  # nearly always; a host may have many ranks, and each has this thread
                self._alarm.wait()
                looked = time.monotonic()
                continue
            with self._lock:
                if now - looked > self._grace:  # this process was suspended, and its watch with it
                    self._missed = dict.fromkeys(self._missed, now)
                due = [host for host, since in self._missed.items() if now - since > self._grace]
                ranks = {host: (self._placed[host], self._agents[host]) for host in due}
            for host in due:
                try:
                    self._declare(host, *ranks[host])
                except EtcdError:
                    pass  # tried again once etcd is back
            looked = time.monotonic()

    def _declare(self, host: str, ranks: Sequence[int], agent: str) -> None:
        """Declare all ranks of a host dead at once, unless the host has a lease again, a successor,
        or was declared dead already."""
        why = without_lease(host).encode()
        deaths = [either([absent(key)], [put(key, why)]) for key in (key_of(DEAD, rank) for rank in ranks)]
        guards = [absent(f"{HOST}{host}"), *held_by(host, agent)]
        gone = [
            delete(f"{PLACED}{host}"),
            delete(f"{AGENT}{host}"),
            put(f"{LOST}{host}", json.dumps(list(ranks)).encode()),
        ]
        self._client.txn(guards, [*gone, *deaths])


def _ranks_in(placed: bytes) -> tuple[int, ...]:
    return tuple(json.loads(placed.decode().partition(" ")[2]))
