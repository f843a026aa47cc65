"""Hosts in etcd: whoever starts the ranks of one holds a lease for all of them, and the ranks see when it is gone.

A lease that has gone is no proof: a member of etcd that was paused and comes back may revoke those of living hosts. So
the others wait for a grace before they declare the ranks of such a host dead, all at once, and meanwhile its holder may
get a new one, unless it is too late. That etcd is silent is no reason for either to do anything.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from recover.fabrics.etcd_agreement import DEAD
from recover.fabrics.etcd_client import (
    EtcdClient,
    EtcdError,
    KeyValue,
    absent,
    delete,
    either,
    get,
    present,
    put,
)

HOST, PLACED = "seen/host/", "seen/placed/"
TTL = 5.0  # seconds; two are too few where cores are busy
GRACE = 1.0  # seconds between the end of a lease and what follows from it
KEEP = 0.25  # seconds between two looks at one's own lease: one that was revoked must be renewed within the grace
LOOK = 0.1  # seconds between two looks at the hosts that seem lost
MOST_RANKS = 120  # of one host: etcd takes 128 operations in a transaction


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
        if len(ranks) > MOST_RANKS or "/" in name or not name:
            raise ValueError(
                f"host {name!r} with {len(ranks)} ranks; give a name without / and {MOST_RANKS} ranks at most"
            )
        self.name, self.ranks = name, tuple(ranks)
        self._client, self._ttl, self._lost = client, ttl, lost
        self._lease = 0
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="recover-etcd-lease", daemon=True)

    def start(self) -> None:
        """Register the host. From here on its ranks may vote."""
        self._lease = self._client.grant(self._ttl)
        host, placed = f"{HOST}{self.name}", f"{PLACED}{self.name}"
        ranks = json.dumps(self.ranks).encode()
        writes = [put(placed, ranks), put(host, b"%d" % self._lease, self._lease)]
        answer = self._client.txn([absent(placed)], writes, [get(host)])
        # The answer to a first try may have been lost.
        if not answer.succeeded and [found.value for found in answer.found[0]] != [b"%d" % self._lease]:
            raise ValueError(f"a host {self.name!r} is in this job already; give each host a name of its own")
        self._thread.start()

    def leave(self) -> None:
        """All its ranks have ended: nobody need miss it."""
        self._left.set()
        self._thread.join()
        self._client.txn([], [delete(f"{PLACED}{self.name}"), delete(f"{HOST}{self.name}")])
        try:
            self._client.revoke(self._lease)
        except EtcdError:
            pass  # it has run out

    def _keep(self) -> None:
        while not self._left.wait(min(self._ttl / 4, KEEP)):
            try:
                if not self._client.keep_alive(self._lease) and not self._register_anew():
                    self._lost()
                    return
            except EtcdError:
                pass  # without etcd nobody can agree on anything, and when it is back leases count from the start

    def _register_anew(self) -> bool:
        """False if the others have given this host up."""
        lease, placed, host = self._client.grant(self._ttl), f"{PLACED}{self.name}", f"{HOST}{self.name}"
        answer = self._client.txn([present(placed)], [put(host, b"%d" % lease, lease)])
        self._lease = lease
        return answer.succeeded


class HostsSeen:
    """A rank's view of the hosts. Those whose lease stays away are declared dead, with all their ranks."""

    def __init__(self, client: EtcdClient, grace: float = GRACE) -> None:
        self._client, self._grace = client, grace
        self._lock = threading.Lock()
        self._placed: dict[str, tuple[int, ...]] = {}
        self._leased: set[str] = set()
        self._missed: dict[str, float] = {}  # since when
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recover-etcd-hosts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def heard(self, news: Iterable[KeyValue]) -> None:
        with self._lock:
            for found in news:
                if found.key.startswith(PLACED):
                    host = found.key.removeprefix(PLACED)
                    self._placed[host] = tuple(json.loads(found.value)) if found.version else ()
                elif found.key.startswith(HOST):
                    host = found.key.removeprefix(HOST)
                    (self._leased.add if found.version else self._leased.discard)(host)
            lost = {host for host, ranks in self._placed.items() if ranks and host not in self._leased}
            now = time.monotonic()
            self._missed = {host: self._missed.get(host, now) for host in lost}

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._stopped.wait(LOOK):
            now = time.monotonic()
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
        why = f"host {host} has lost its lease".encode()
        deaths = [either([absent(f"{DEAD}{rank}")], [put(f"{DEAD}{rank}", why)]) for rank in ranks]
        guards = [absent(f"{HOST}{host}"), present(f"{PLACED}{host}")]
        self._client.txn(guards, [delete(f"{PLACED}{host}"), *deaths])
