"""Connections inside a replica: its lowest rank, the leader, talks to etcd for all ranks of the
replica.

So etcd has one vote and one watch per replica. The other ranks, the followers, send the leader
their votes over a connection on which every message is signed with the job's token, and the leader
passes every change that it hears from etcd on to them. The leader's address is part of its claim. A
lost connection loses nothing: a follower connects again, reads etcd itself, and sends its vote
again. No decision depends on these connections: a rank that dies or is silent is declared dead in
etcd like any other.
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
from recover.job.sockets import detect_connection_loss
from recover.world.fabrics.etcd.agreement import CLAIM, Vote, key_of
from recover.world.fabrics.etcd.client import EtcdClient, KeyValue
from recover.world.fabrics.etcd.watch import EtcdWatch

CONNECT, SEND = 2, 1  # seconds; a follower that does not read is disconnected, and may connect again
AGAIN = 0.02  # seconds between two attempts to reach the leader
MOST = 1 << 16  # bytes in a message of a follower
LOST = 10.0  # seconds without an answer of the peer's kernel; a follower then connects again


@dataclass(frozen=True)
class PeerVote:
    """The vote of one rank of a replica, and the host whose lease it needs."""

    vote: Vote
    host: str | None

    @property
    def number(self) -> int:
        return self.vote.number

    def to_bytes(self) -> bytes:
        return json.dumps([self.vote.to_bytes().decode(), self.host]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> PeerVote:
        vote, host = json.loads(data)
        return cls(Vote.from_bytes(vote.encode()), host)


class Channel:
    """A connection on which every message is signed: for the session, the sender, and the number of
    the message.

    Both ends draw a part of the session's name, so no message of another connection is valid in it.
    """

    def __init__(
        self, connection: Connection, authenticator: Authenticator, leads: bool, session: str
    ) -> None:
        self.connection, self.session = connection, session
        self._authenticator = authenticator
        self._mine, self._theirs = ("speaker", "peer") if leads else ("peer", "speaker")
        self._sent = self._received = 0

    def send(self, data: bytes) -> None:
        place = f"{self.session} {self._mine} {self._sent}"
        self._sent += 1
        self.connection.send_bytes(self._authenticator.sign(place, data))

    def receive(self, most: int | None = None) -> bytes:
        """Receive a message. Raises AuthenticationError for a message that the other end has not signed."""
        place = f"{self.session} {self._theirs} {self._received}"
        self._received += 1
        data = self._authenticator.opened(place, self.connection.recv_bytes(most))
        if data is None:
            raise AuthenticationError(
                "a message between ranks of a replica was not signed with the job's token"
            )
        return data

    @classmethod
    def of_leader(cls, connection: Connection, authenticator: Authenticator) -> tuple[Channel, int]:
        """The leader's end, and the rank of the follower, which has proved that it knows the token."""
        mine = secrets.token_hex(16)
        connection.send_bytes(mine.encode())
        channel = cls(connection, authenticator, True, mine)
        rank, theirs = json.loads(channel.receive(MOST))
        channel.session = f"{mine} {theirs} {rank}"
        return channel, rank

    @classmethod
    def of_follower(cls, connection: Connection, authenticator: Authenticator, rank: int) -> Channel:
        """The follower's end.

        Returns when the leader has proved that it knows the token, and passes on all changes.
        """
        theirs, mine = connection.recv_bytes(MOST).decode(), secrets.token_hex(16)
        channel = cls(connection, authenticator, False, theirs)
        channel.send(json.dumps([rank, mine]).encode())
        channel.session = f"{theirs} {mine} {rank}"
        channel.receive()
        return channel


class ReplicaLeader:
    """The leader's end of all connections. `on_vote` is called when a follower has voted."""

    def __init__(self, address: str, token: str, on_vote: Callable[[], None]) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.address = f"{address}:{self._listener.getsockname()[1]}"
        self._authenticator, self._on_vote = Authenticator(token, "replica-peers"), on_vote
        self._lock = threading.Lock()
        self._votes: dict[int, PeerVote] = {}
        self._followers: dict[int, Channel] = {}
        threading.Thread(target=self._accept, name="recover-etcd-leader", daemon=True).start()

    def votes(self, number: int) -> dict[int, PeerVote]:
        """The votes that followers have sent for this agreement so far, by rank."""
        with self._lock:
            return {rank: vote for rank, vote in self._votes.items() if vote.number == number}

    def pass_on(self, changes: Sequence[KeyValue]) -> None:
        rows = [[one.key, base64.b64encode(one.value).decode(), one.version, one.modified] for one in changes]
        data = json.dumps(rows).encode()
        with self._lock:
            for rank, channel in list(self._followers.items()):
                try:
                    channel.send(data)
                except OSError:
                    self._disconnect(rank)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the accepting thread
        self._listener.close()
        with self._lock:
            for rank in list(self._followers):
                self._disconnect(rank)

    def _accept(self) -> None:
        while True:
            try:
                opened, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=[opened], name="recover-etcd-follower", daemon=True
            ).start()

    def _serve(self, opened: socket.socket) -> None:
        """Receive the votes of one follower until its connection is lost."""
        with suppress(OSError, EOFError, ValueError, AuthenticationError), _configured(opened) as connection:
            channel, rank = Channel.of_leader(connection, self._authenticator)
            with self._lock:
                self._disconnect(rank)
                self._followers[rank] = channel
                # Sent after it was registered, under the lock: the follower reads etcd when this
                # arrives, and every change after that read is passed on.
                channel.send(b"[]")
            _set_timeout(connection, socket.SO_RCVTIMEO, 0)
            while True:
                vote = PeerVote.from_bytes(channel.receive(MOST))
                with self._lock:
                    self._votes[rank] = vote
                self._on_vote()

    def _disconnect(self, rank: int) -> None:
        if channel := self._followers.pop(rank, None):
            _shut_down(channel.connection)


class ReplicaFollower(EtcdWatch):
    """A watch of etcd by way of the leader, and the sender of this rank's votes."""

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        on_change: Callable[[Sequence[KeyValue]], None],
        rank: int,
        leader: int,
        token: str,
    ) -> None:
        super().__init__(client, prefix, on_change)
        self._rank, self._leader, self._authenticator = rank, leader, Authenticator(token, "replica-peers")
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._last: PeerVote | None = None

    def send_vote(self, vote: PeerVote) -> None:
        """Send the vote to the leader now, or as soon as there is a connection."""
        with self._lock:
            self._last = vote
            if self._channel is not None:
                with suppress(OSError):
                    self._channel.send(vote.to_bytes())

    def _follow(self, revision: int) -> None:
        claim = self._client.get(key_of(CLAIM, self._leader))
        if claim is None or not claim.value:
            time.sleep(AGAIN)  # the leader has not started yet
            return
        host, _, port = json.loads(claim.value)["address"].rpartition(":")
        try:
            with _configured(socket.create_connection((host, int(port)), CONNECT)) as connection:
                channel = Channel.of_follower(connection, self._authenticator, self._rank)
                _set_timeout(connection, socket.SO_RCVTIMEO, 0)
                self._receive(channel)
        except (OSError, EOFError, ValueError, AuthenticationError):
            time.sleep(AGAIN)

    def _receive(self, channel: Channel) -> None:
        with self._lock:
            self._channel = channel
            if self._last is not None:
                channel.send(self._last.to_bytes())
        try:
            # Changes before the leader registered this connection are read from etcd, later ones
            # are passed on.
            self._read_all()
            while not self._stopped:
                rows = json.loads(channel.receive())
                self._deliver(
                    [KeyValue(key, base64.b64decode(value), *numbers) for key, value, *numbers in rows]
                )
        finally:
            with self._lock:
                self._channel = None

    def _interrupt(self) -> None:
        with self._lock:
            if self._channel is not None:
                _shut_down(self._channel.connection)


def _configured(opened: socket.socket) -> Connection:
    """Set timeouts: a peer that sends nothing at first, or does not read later, must not block this
    end for long."""
    opened.settimeout(None)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    detect_connection_loss(opened, LOST)
    connection = Connection(opened.detach())
    _set_timeout(connection, socket.SO_RCVTIMEO, CONNECT)
    _set_timeout(connection, socket.SO_SNDTIMEO, SEND)
    return connection


def _set_timeout(connection: Connection, what: int, seconds: int) -> None:
    with _socket(connection) as opened:
        opened.setsockopt(socket.SOL_SOCKET, what, struct.pack("ll", seconds, 0))


def _shut_down(connection: Connection) -> None:
    """Wake the thread that reads from it, which closes it."""
    with suppress(OSError), _socket(connection) as opened:
        opened.shutdown(socket.SHUT_RDWR)


@contextmanager
def _socket(connection: Connection) -> Iterator[socket.socket]:
    opened = socket.socket(fileno=connection.fileno())
    try:
        yield opened
    finally:
        opened.detach()  # the connection still owns the descriptor
