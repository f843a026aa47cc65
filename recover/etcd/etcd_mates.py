"""Inside a replica: its lowest rank speaks for all of it, so that etcd sees one vote per replica, and one watch.

The others, its mates, tell it what they vote, over a connection that begins with a proof by both that they know the
job's token, and it passes on to them whatever it hears from etcd. Where it listens is part of its claim. Nothing is
lost with a connection: a mate connects again, reads for itself what there is, and says again what it votes. Nothing
that is decided depends on this: who dies, or is silent, is declared in etcd like any other.
"""

from __future__ import annotations

import base64
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from recover.etcd.etcd_agreement import CLAIM, Vote, key_of
from recover.etcd.etcd_client import EtcdClient, KeyValue
from recover.etcd.etcd_watch import EtcdWatch

CONNECT, SEND = 2, 1  # seconds; who does not take what it is sent is left, and may come again
AGAIN = 0.02  # seconds between two tries to reach the speaker
MOST = 1 << 16  # bytes of what a mate says


@dataclass(frozen=True)
class Said:
    """What a mate votes in an agreement, and the host whose lease its vote needs."""

    vote: Vote
    host: str | None

    @property
    def number(self) -> int:
        return self.vote.number

    def to_bytes(self) -> bytes:
        return json.dumps([self.vote.to_bytes().decode(), self.host]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Said:
        vote, host = json.loads(data)
        return cls(Vote.from_bytes(vote.encode()), host)


class Speaker:
    """The end of the rank that speaks. `woken` is called when a mate has said something."""

    def __init__(self, address: str, token: str, woken: Callable[[], None]) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._door = socket.create_server((address, 0), family=family)
        self.address = f"{address}:{self._door.getsockname()[1]}"
        self._key, self._woken = token.encode(), woken
        self._lock = threading.Lock()
        self._said: dict[int, Said] = {}
        self._mates: dict[int, Connection] = {}
        threading.Thread(target=self._accept, name="recover-etcd-speaker", daemon=True).start()

    def said(self, number: int) -> dict[int, Said]:
        """What the mates have said in this agreement so far."""
        with self._lock:
            return {mate: said for mate, said in self._said.items() if said.number == number}

    def tell(self, news: Sequence[KeyValue]) -> None:
        told = [[one.key, base64.b64encode(one.value).decode(), one.version, one.modified] for one in news]
        data = json.dumps(told).encode()
        with self._lock:
            for mate, connection in list(self._mates.items()):
                try:
                    connection.send_bytes(data)
                except OSError:
                    self._leave(mate)

    def close(self) -> None:
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # frees the thread
        self._door.close()
        with self._lock:
            for mate in list(self._mates):
                self._leave(mate)

    def _accept(self) -> None:
        while True:
            try:
                opened, _ = self._door.accept()
            except OSError:
                return
            threading.Thread(
                target=self._listen, args=[opened], name="recover-etcd-mate", daemon=True
            ).start()

    def _listen(self, opened: socket.socket) -> None:
        """To one mate, until its connection is lost."""
        with suppress(OSError, EOFError, ValueError, AuthenticationError), _made_ready(opened) as connection:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            mate = int(connection.recv_bytes(MOST))
            with self._lock:
                self._leave(mate)
                self._mates[mate] = connection
                connection.send_bytes(b"[]")  # from here on it misses nothing
            _limit(connection, socket.SO_RCVTIMEO, 0)
            while True:
                said = Said.from_bytes(connection.recv_bytes(MOST))
                with self._lock:
                    self._said[mate] = said
                self._woken()

    def _leave(self, mate: int) -> None:
        if connection := self._mates.pop(mate, None):
            _cut(connection)


class Spoken(EtcdWatch):
    """A watch that hears from the speaker what a mate is to hear of etcd."""

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        on_news: Callable[[Sequence[KeyValue]], None],
        rank: int,
        speaker: int,
        token: str,
    ) -> None:
        super().__init__(client, prefix, on_news)
        self._rank, self._speaker, self._key = rank, speaker, token.encode()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._last: Said | None = None

    def say(self, said: Said) -> None:
        """To the speaker, now if it is reached, or else as soon as it is."""
        with self._lock:
            self._last = said
            if self._connection is not None:
                with suppress(OSError):
                    self._connection.send_bytes(said.to_bytes())

    def _follow(self, revision: int) -> None:
        claim = self._client.get(key_of(CLAIM, self._speaker))
        if claim is None or not claim.value:
            time.sleep(AGAIN)  # it has not come yet
            return
        host, _, port = json.loads(claim.value)["address"].rpartition(":")
        try:
            with _made_ready(socket.create_connection((host, int(port)), CONNECT)) as connection:
                answer_challenge(connection, self._key)
                deliver_challenge(connection, self._key)
                connection.send_bytes(b"%d" % self._rank)
                connection.recv_bytes()
                _limit(connection, socket.SO_RCVTIMEO, 0)
                self._hear(connection)
        except (OSError, EOFError, AuthenticationError):
            time.sleep(AGAIN)

    def _hear(self, connection: Connection) -> None:
        with self._lock:
            self._connection = connection
            if self._last is not None:
                connection.send_bytes(self._last.to_bytes())
        try:
            self._read_all()  # what has happened before the speaker knew of this connection
            while not self._stopped:
                told = json.loads(connection.recv_bytes())
                self._tell(
                    [KeyValue(key, base64.b64decode(value), *numbers) for key, value, *numbers in told]
                )
        finally:
            with self._lock:
                self._connection = None

    def _free(self) -> None:
        with self._lock:
            if self._connection is not None:
                _cut(self._connection)


def _made_ready(opened: socket.socket) -> Connection:
    """Prompt, and not to be blocked for long by one who says nothing at first, or does not read later."""
    opened.settimeout(None)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection = Connection(opened.detach())
    _limit(connection, socket.SO_RCVTIMEO, CONNECT)
    _limit(connection, socket.SO_SNDTIMEO, SEND)
    return connection


def _limit(connection: Connection, what: int, seconds: int) -> None:
    with _socket(connection) as opened:
        opened.setsockopt(socket.SOL_SOCKET, what, struct.pack("ll", seconds, 0))


def _cut(connection: Connection) -> None:
    """Whoever reads from it is freed, and closes it."""
    with suppress(OSError), _socket(connection) as opened:
        opened.shutdown(socket.SHUT_RDWR)


@contextmanager
def _socket(connection: Connection) -> Iterator[socket.socket]:
    opened = socket.socket(fileno=connection.fileno())
    try:
        yield opened
    finally:
        opened.detach()  # it stays the connection's
