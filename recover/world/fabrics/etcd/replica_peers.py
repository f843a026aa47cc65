"""Inside a replica: its lowest rank speaks for all of it, so that etcd sees one vote per replica, and one watch.

The others, its mates, tell it what they vote, over a connection on which every message is signed with the job's token,
and it passes on to them whatever it hears from etcd. Where it listens is part of its claim. Nothing is
lost with a connection: a mate connects again, reads for itself what there is, and says again what it votes. Nothing
that is decided depends on this: who dies, or is silent, is declared in etcd like any other.
"""

from __future__ import annotations

import base64
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

from recover.job.authentication import Authenticator
from recover.job.sockets import notice_loss
from recover.world.fabrics.etcd.agreement import CLAIM, Vote, key_of
from recover.world.fabrics.etcd.client import EtcdClient, KeyValue
from recover.world.fabrics.etcd.watch import EtcdWatch

CONNECT, SEND = 2, 1  # seconds; who does not take what it is sent is left, and may come again
AGAIN = 0.02  # seconds between two tries to reach the speaker
MOST = 1 << 16  # bytes of what a mate says
LOST = (
    10.0  # seconds without an answer of the other's kernel: a mate then connects again, and nothing is lost
)


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


class Channel:
    """A connection on which every message is signed: for the session, who speaks, and how many came before.

    The session is what both ends have drawn for it, so nothing of another connection can be brought into it.
    """

    def __init__(
        self, connection: Connection, authenticator: Authenticator, speaks: bool, session: str
    ) -> None:
        self.connection, self.session = connection, session
        self._authenticator = authenticator
        self._mine, self._theirs = ("speaker", "mate") if speaks else ("mate", "speaker")
        self._sent = self._received = 0

    def send(self, data: bytes) -> None:
        place = f"{self.session} {self._mine} {self._sent}"
        self._sent += 1
        self.connection.send_bytes(self._authenticator.sign(place, data))

    def receive(self, most: int | None = None) -> bytes:
        """Raises AuthenticationError for what the other end has not signed."""
        place = f"{self.session} {self._theirs} {self._received}"
        self._received += 1
        data = self._authenticator.opened(place, self.connection.recv_bytes(most))
        if data is None:
            raise AuthenticationError("a message between mates was not signed with the job's token")
        return data

    @classmethod
    def of_speaker(cls, connection: Connection, authenticator: Authenticator) -> tuple[Channel, int]:
        """And the rank of the mate, which has shown that it knows the token."""
        mine = secrets.token_hex(16)
        connection.send_bytes(mine.encode())
        channel = cls(connection, authenticator, True, mine)
        rank, theirs = json.loads(channel.receive(MOST))
        channel.session = f"{mine} {theirs} {rank}"
        return channel, rank

    @classmethod
    def of_mate(cls, connection: Connection, authenticator: Authenticator, rank: int) -> Channel:
        """Returns when the speaker has shown that it knows the token, and tells this mate all from here on."""
        theirs, mine = connection.recv_bytes(MOST).decode(), secrets.token_hex(16)
        channel = cls(connection, authenticator, False, theirs)
        channel.send(json.dumps([rank, mine]).encode())
        channel.session = f"{theirs} {mine} {rank}"
        channel.receive()
        return channel


class Speaker:
    """The end of the rank that speaks. `woken` is called when a mate has said something."""

    def __init__(self, address: str, token: str, woken: Callable[[], None]) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._door = socket.create_server((address, 0), family=family)
        self.address = f"{address}:{self._door.getsockname()[1]}"
        self._authenticator, self._woken = Authenticator(token, "mates"), woken
        self._lock = threading.Lock()
        self._said: dict[int, Said] = {}
        self._mates: dict[int, Channel] = {}
        threading.Thread(target=self._accept, name="recover-etcd-speaker", daemon=True).start()

    def said(self, number: int) -> dict[int, Said]:
        """What the mates have said in this agreement so far."""
        with self._lock:
            return {mate: said for mate, said in self._said.items() if said.number == number}

    def tell(self, news: Sequence[KeyValue]) -> None:
        told = [[one.key, base64.b64encode(one.value).decode(), one.version, one.modified] for one in news]
        data = json.dumps(told).encode()
        with self._lock:
            for mate, channel in list(self._mates.items()):
                try:
                    channel.send(data)
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
            channel, mate = Channel.of_speaker(connection, self._authenticator)
            with self._lock:
                self._leave(mate)
                self._mates[mate] = channel
                channel.send(b"[]")  # from here on it misses nothing
            _limit(connection, socket.SO_RCVTIMEO, 0)
            while True:
                said = Said.from_bytes(channel.receive(MOST))
                with self._lock:
                    self._said[mate] = said
                self._woken()

    def _leave(self, mate: int) -> None:
        if channel := self._mates.pop(mate, None):
            _cut(channel.connection)


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
        self._rank, self._speaker, self._authenticator = rank, speaker, Authenticator(token, "mates")
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._last: Said | None = None

    def say(self, said: Said) -> None:
        """To the speaker, now if it is reached, or else as soon as it is."""
        with self._lock:
            self._last = said
            if self._channel is not None:
                with suppress(OSError):
                    self._channel.send(said.to_bytes())

    def _follow(self, revision: int) -> None:
        claim = self._client.get(key_of(CLAIM, self._speaker))
        if claim is None or not claim.value:
            time.sleep(AGAIN)  # it has not come yet
            return
        host, _, port = json.loads(claim.value)["address"].rpartition(":")
        try:
            with _made_ready(socket.create_connection((host, int(port)), CONNECT)) as connection:
                channel = Channel.of_mate(connection, self._authenticator, self._rank)
                _limit(connection, socket.SO_RCVTIMEO, 0)
                self._hear(channel)
        except (OSError, EOFError, ValueError, AuthenticationError):
            time.sleep(AGAIN)

    def _hear(self, channel: Channel) -> None:
        with self._lock:
            self._channel = channel
            if self._last is not None:
                channel.send(self._last.to_bytes())
        try:
            self._read_all()  # what has happened before the speaker knew of this connection
            while not self._stopped:
                told = json.loads(channel.receive())
                self._tell(
                    [KeyValue(key, base64.b64decode(value), *numbers) for key, value, *numbers in told]
                )
        finally:
            with self._lock:
                self._channel = None

    def _free(self) -> None:
        with self._lock:
            if self._channel is not None:
                _cut(self._channel.connection)


def _made_ready(opened: socket.socket) -> Connection:
    """Prompt, and not to be blocked for long by one who says nothing at first, or does not read later."""
    opened.settimeout(None)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    notice_loss(opened, LOST)
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
