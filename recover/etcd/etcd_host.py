"""Hosts in etcd: whoever starts the ranks of one holds a lease for all of them, and the ranks see when it is gone.

A lease that has gone is no proof: a member of etcd that was paused and comes back may revoke those of living hosts. So
the others wait for a grace before they declare the ranks of such a host dead, all at once, and meanwhile its holder may
get a new one, unless it is too late. That etcd is silent is no reason for either to do anything.

What users call a lease is all of it, etcd's and the grace: about so long after its last sign a host is dead to all.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from recover.etcd.etcd_agreement import DEAD, key_of
from recover.etcd.etcd_client import (
    EtcdClient,
    EtcdError,
    KeyValue,
    absent,
    delete,
    either,
    get,
    present,
    put,
    value_is,
    version_is,
)
from recover.job.hosts_asked import LEASE

HOST, PLACED = "seen/host/", "seen/placed/"
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


class HostLease:
    """Held by the process that starts a host's ranks. `lost` is called if the others have given the host up."""

    def __init__(
        self,
        client: EtcdClient,
        name: str,
        ranks: Sequence[int],
        ttl: float = TTL,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        if "/" in name or not name:
            raise ValueError(f"host {name!r}: give a name without /")
        self.name = name
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
        host, placed = f"{HOST}{self.name}", f"{PLACED}{self.name}"
        ranks = json.dumps(self.ranks).encode()
        writes = [put(placed, ranks), put(host, b"%d" % self._lease, self._lease)]
        # One of this name that was lost while it had no ranks was missed by nobody.
        self._client.txn([value_is(placed, b"[]"), absent(host)], [delete(placed)])
        answer = self._client.txn([absent(placed)], writes, [get(host)])
        # The answer to a first try may have been lost.
        if not answer.succeeded and [found.value for found in answer.found[0]] != [b"%d" % self._lease]:
            raise ValueError(f"a host {self.name!r} is in this job already; give each host a name of its own")
        for thread in self._threads:
            thread.start()

    def place(self, ranks: Sequence[int]) -> None:
        """These are the host's ranks from now on: new ones before they start, without those that have ended."""
        ranks, placed = self._checked(ranks), f"{PLACED}{self.name}"
        writes = [put(placed, json.dumps(ranks).encode())]
        # If the host was given up meanwhile, its holder is told.
        self._client.txn([version_is(placed, self._placings)], writes)
        self.ranks, self._placings = ranks, self._placings + 1

    def _checked(self, ranks: Sequence[int]) -> tuple[int, ...]:
        if len(ranks) > MOST_RANKS:
            raise ValueError(f"host {self.name!r} with {len(ranks)} ranks; etcd takes {MOST_RANKS} at most")
        return tuple(ranks)

    def leave(self) -> None:
        """All its ranks have ended: nobody need miss it."""
        self._left.set()
        for thread in self._threads:
            if thread.is_alive():  # not even begun, where etcd has refused the lease
                thread.join()
        self._client.txn([], [delete(f"{PLACED}{self.name}"), delete(f"{HOST}{self.name}")])
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
        placed, host = f"{PLACED}{self.name}", f"{HOST}{self.name}"
        guards, writes = [present(placed), absent(host)], [put(host, b"%d" % lease, lease)]
        answer = self._client.txn(guards, [*writes, get(placed), get(host)], [get(placed), get(host)])
        there, bound = answer.found
        if bound:
            self._lease = int(bound[0].value)
        return bool(there)

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
        self._leased: set[str] = set()
        self._missed: dict[str, float] = {}  # since when
        self._stopped, self._alarm = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="recover-etcd-hosts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._alarm.set()

    def heard(self, news: Iterable[KeyValue]) -> None:
        about_hosts = [found for found in news if found.key.startswith((PLACED, HOST))]
        if not about_hosts:
            return  # nearly always: a decision
        with self._lock:
            for found in about_hosts:
                if found.key.startswith(PLACED):
                    host = found.key.removeprefix(PLACED)
                    self._placed[host] = tuple(json.loads(found.value)) if found.version else ()
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
                ranks = {host: self._placed[host] for host in due}
            for host in due:
                try:
                    self._declare(host, ranks[host])
                except EtcdError:
                    pass  # once etcd is back
            looked = time.monotonic()

    def _declare(self, host: str, ranks: Sequence[int]) -> None:
        """All its ranks at once, unless it has come back, or somebody else was faster."""
        why = without_lease(host).encode()
        deaths = [either([absent(key)], [put(key, why)]) for key in (key_of(DEAD, rank) for rank in ranks)]
        guards = [absent(f"{HOST}{host}"), present(f"{PLACED}{host}")]
        self._client.txn(guards, [delete(f"{PLACED}{host}"), *deaths])
