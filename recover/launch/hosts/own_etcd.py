"""The etcd of a job: the one that answers at --rdzv-endpoint, or else members that the hosts of the
job start.

A host whose address is named in --rdzv-endpoint, and on whose port no process listens, starts a
member there: the only one, or one of three. It listens at that address and port, and, for the other
members, on the next port. For a job on one host it may listen on a Unix socket in a directory that
only this user can enter.
"""

from __future__ import annotations

import socket
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from recover.job.output import say
from recover.job.spec import EtcdAccess
from recover.launch.hosts.addresses import is_loopback, is_of_this_host, resolved
from recover.launch.preflight import Refusal
from recover.world.fabrics.etcd.access import client_of
from recover.world.fabrics.etcd.client import UNIX, EtcdClient, EtcdError, UnansweredError
from recover.world.fabrics.etcd.server import EtcdServer, NoEtcdError, peer_of

_AGAIN = 0.1  # seconds between two tries
_PROBE = 1.0  # seconds for a connection
_READ_ONCE = 0.0
_ANSWER = 2.0  # seconds for etcd to answer an agent that looks after its ranks meanwhile
_LEAVING = "etcd-leaving/"  # keys of members whose hosts leave
MAKE_TOKEN = "(umask 077; head -c 32 /dev/urandom | base64 > token)"
_TRIES = 20
# Errors of etcd for a member whose name is known and whose data are lost: by a peer that it
# reaches, or later.
_KNOWN_BEFORE = "has already been bootstrapped", "is out of range [lastIndex"


def check_token(access: EtcdAccess, alone: bool) -> None:
    """Raises Refusal if an etcd without access control, started by this host, would have to store
    the token."""
    if alone or access.token or is_protected(access):
        return
    if (endpoint := missing_here(access, alone)) is not None:
        raise Refusal(
            f"--token-file is not given, and no process listens at {endpoint}: any process that reaches the etcd that "
            f"is started there could read the job's token, and take part; make a token, {MAKE_TOKEN}, copy it to all "
            "hosts, and give each of them --token-file token"
        )


class OwnEtcd:
    """The etcd of a job, as a context manager: a member that was started is ended at exit; only
    data in a directory that was given stay."""

    def __init__(self, access: EtcdAccess, directory: Path, alone: bool) -> None:
        self._access, self._directory, self._alone = access, directory, alone
        self.server: EtcdServer | None = None
        self._is_over = threading.Event()
        self._keeper: threading.Thread | None = None
        self._endpoint = ""  # of the member that was started here

    def __enter__(self) -> OwnEtcd:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._keeper is not None:
            self._keeper.join()
        if self.server is not None:
            self.server.kill()  # its directory lies in the session, or was given

    def needs_this_host(self) -> str:
        """Why etcd would be lost without the member of this host; "" if it would not be. Then the
        departure of the member is reserved."""
        if self.server is None:
            return ""
        endpoints = self._access.endpoints
        if len(endpoints) == 1:
            return f"it runs the job's only etcd (at {endpoints[0]}); name three endpoints"
        client = client_of(replace(self._access, patience=_ANSWER))
        try:
            # Reserved before the others are counted: of two hosts that are asked at once, each counts the other
            # one as gone.
            client.put(f"{_LEAVING}{self._endpoint}", b"")
            leaving = {each.key.rpartition("/")[2] for each in client.get_all(_LEAVING)[0]}
            pairs = [_parts(endpoint) for endpoint in endpoints if endpoint not in leaving]
            others, majority = sum(_listens(host, port) for host, port in pairs), len(endpoints) // 2 + 1
            if others >= majority:
                return ""
            client.delete_all(f"{_LEAVING}{self._endpoint}")
        except EtcdError as error:
            return f"it runs a member of etcd, and etcd does not answer ({error})"
        return f"without its member of etcd {others} of {len(endpoints)} would be left, and {majority} are needed"

    def find_or_start(self, patience: float, stopped: Callable[[], object]) -> EtcdClient:
        """A client of an etcd that answers. Raises Refusal, also if none answers for `patience`
        seconds."""
        client = client_of(replace(self._access, patience=_READ_ONCE))
        mine = self._mine()
        deadline = time.monotonic() + patience
        while not stopped():
            try:
                answered = self._answers(client)
            except EtcdError as error:
                raise Refusal(f"--rdzv-endpoint: {error}") from None
            if answered and (mine is None or self.server is not None):
                break
            if mine is not None and self.server is None:
                self._start(mine, client if answered else None)
                mine = None if self.server is None else mine
                continue
            try:
                if self.server is not None:
                    self.server.check()
            except NoEtcdError as error:
                if not any(words in str(error) for words in _KNOWN_BEFORE):
                    raise Refusal(str(error)) from None
                self._leave_to_others()
                mine = None
            if time.monotonic() > deadline:
                raise Refusal(self._nobody(patience))
            time.sleep(_AGAIN)
        if self.server is not None and not stopped():
            client.delete_all(f"{_LEAVING}{self._endpoint}")  # of an agent that was here before
            # A member ends with the thread that has started it: this one stays until the end of the job.
            self._keeper = threading.Thread(target=self._keep_running, name="recover-etcd", daemon=True)
            self._keeper.start()
        return client_of(self._access)

    def _keep_running(self) -> None:
        """Start the member again, with its data, if SIGTERM has ended it. Slurm sends SIGTERM to all processes of a
        job that is cancelled, and the ranks need etcd to agree on their last step."""
        assert self.server is not None
        while not self._is_over.wait(_AGAIN):
            if self.server.was_terminated:
                say("etcd of this host was ended by SIGTERM before the job: it is started again")
                self.server.begin()

    def _mine(self) -> str | None:
        """The endpoint at which this host is to start a member; None if it is to start none."""
        found = missing_here(self._access, self._alone)
        if found is not None and is_protected(self._access):
            say(
                f"no process listens at {found}; an etcd with users or TLS is not started here: waiting for it"
            )
            return None
        return found

    def _start(self, endpoint: str, cluster: EtcdClient | None) -> None:
        """Start the member of this endpoint, unless the cluster that answers has it, or had it."""
        endpoints = self._access.endpoints
        if cluster is not None and not _is_awaited(cluster, f"http://{peer_of(_numeric(endpoint))}"):
            say(f"no process listens at {endpoint}, and etcd answers without it: no member is started there")
            return
        if len(endpoints) % 2 == 0:
            raise Refusal(
                f"--rdzv-endpoint names {len(endpoints)} hosts, and no etcd answers: an etcd of {len(endpoints)} "
                "members is lost with half of them; give one, or three"
            )
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if endpoint.startswith(UNIX):
                    sockets = Path(endpoint.removeprefix(UNIX)).parent
                    self.server = EtcdServer(self._directory, sockets=sockets)
                else:
                    host, port = _parts(_numeric(endpoint))
                    members = tuple(map(_numeric, endpoints)) if len(endpoints) > 1 else ()
                    self.server = EtcdServer(self._directory, host, port, members=members)
            # In the memory of one host etcd ends with the job: a crash of it loses nothing that could be kept.
            if not (self._alone and _in_memory(self._directory)):
                for warning in caught:
                    say(str(warning.message))
            self.server.begin()
            self._endpoint = endpoint
        except NoEtcdError as error:
            raise Refusal(f"no etcd answers at {endpoint}, and {error}") from None
        where = "in memory" if _in_memory(self._directory) else f"with its data in {self._directory}"
        say(f"started etcd at {endpoint}, {where}")

    def _leave_to_others(self) -> None:
        """Stop the member of this host: the other members had not answered for a moment, as when
        their leader is lost, and know this member, whose data are lost."""
        assert self.server is not None
        self.server.kill()
        self.server = None
        say(
            "the other members of etcd know the member of this host, whose data are lost: it is not started; waiting "
            "for the others"
        )

    def _answers(self, client: EtcdClient) -> bool:
        for _ in self._access.endpoints:
            try:
                client.get("ready?")  # by consensus
                return True
            except UnansweredError:
                pass
        return False

    def _nobody(self, patience: float) -> str:
        names = ", ".join(self._access.endpoints)
        pairs = [_parts(endpoint) for endpoint in self._access.endpoints if not endpoint.startswith(UNIX)]
        if there := [f"{host}:{port}" for host, port in pairs if _listens(host, port)]:
            return (
                f"a process listens at {', '.join(there)}, and no etcd answers after {patience:g} s; is it one, does a "
                "majority of its members run, and, if it wants TLS, was --etcd-ca given?"
            )
        return (
            f"no etcd answers at {names} after {patience:g} s; is this command running on the hosts named there, with "
            "the same --rdzv-endpoint, and is the port open between them?"
        )


def missing_here(access: EtcdAccess, alone: bool) -> str | None:
    """The endpoint of this host at which no process listens, if any. Raises Refusal."""
    found = None
    for endpoint in access.endpoints:
        if endpoint.startswith(UNIX):
            return endpoint
        host, port = _parts(endpoint)
        addresses = resolved(host)
        if not addresses:
            raise Refusal(
                f"--rdzv-endpoint: {host} has no address on this host; check the name, or /etc/hosts"
            )
        here = [address for address in addresses if is_of_this_host(address)]
        if any(map(is_loopback, here)) and not alone:
            raise Refusal(
                f"--rdzv-endpoint: {host} is {here[0]} on this host, where no other host can reach it; fix "
                "/etc/hosts (Debian writes 127.0.1.1 for the host's own name), or give the address itself"
            )
        if here and not _listens(here[0], port):
            found = endpoint
    return found


def is_protected(access: EtcdAccess) -> bool:
    """Whether etcd needs users or TLS. Such an etcd is never started here."""
    return bool(access.ca or access.user)


def _is_awaited(cluster: EtcdClient, peer: str) -> bool:
    """Whether the cluster expects a member at this address that has never started: a member that
    has lost its data must not start under its old name. A member has client URLs once it has
    started."""
    for _ in range(_TRIES):  # a member that has just answered may be busy; the next one is asked
        try:
            members = cluster.ask("/v3/cluster/member/list", {}).get("members", [])
            break
        except UnansweredError:
            time.sleep(_AGAIN)
        except EtcdError:
            return False
    else:
        return False
    return any(peer in member.get("peerURLs", []) and not member.get("clientURLs") for member in members)


def _listens(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=_PROBE):
            return True
    except OSError:
        return False


def _parts(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def _numeric(endpoint: str) -> str:
    """The endpoint with the address in place of the name: members must agree about it, however a
    host resolves the name."""
    host, port = _parts(endpoint)
    address = resolved(host)[0]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _in_memory(directory: Path) -> bool:
    return directory.is_relative_to("/dev/shm")
