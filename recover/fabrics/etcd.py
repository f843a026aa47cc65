"""The fabric for where whole hosts vanish: one agreement, one list of the dead, small messages, all as keys in etcd.

Keys, all under the prefix of the client, which is the job's own:

    job                what the job is, so that another one of the same name is refused
    claim/<rank>       which process is this rank; made once, so nobody comes back under a number that was used
    vote/<rank>        its vote in the agreement under way: number, word, the deaths it has acknowledged
    seen/decision      the last agreement. Its version is the agreement's number: it is written once for each
    seen/dead/<rank>   a death; made once, never taken back
    seen/host/<host>   bound to the host's lease (`recover.fabrics.etcd_host`)
    seen/placed/<host> its ranks
    mail/...           messages, until the next agreement is decided

What is under `seen/` is watched by every rank. Votes are not: who votes gets them with the answer, and the last one
decides.

Agreement k. A vote counts if, in one transaction: the voter is not declared dead, its host's lease stands, it has voted
k - 1 times, and k - 1 agreements are decided. Who has read the votes of all the living writes the decision: the AND of
their words and the set of the dead, guarded by "k - 1 agreements are decided, and nobody died since that read".
Any member may. Decision k + 1 needs the votes of all the living, so all of them have read decision k by then, and one
key is enough. Whoever finds itself dead, or the world further than k, ends: it was stopped, or cut off, and the others
went on. No clock takes part in this; a transaction that is carried out twice, or late, fails its guards.

There is one vote per rank, since ranks are what the `Fabric` interface knows: votes are not summed up inside a replica
first.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from recover.fabrics.base import FabricError
from recover.fabrics.etcd_agreement import DEAD, DECISION, LOOK, Decision, Look, Vote, declare, rank_of
from recover.fabrics.etcd_client import (
    Answer,
    EtcdClient,
    EtcdError,
    KeyValue,
    Operation,
    absent,
    delete_all,
    get,
    present,
    put,
    unchanged_since,
    version_is,
)
from recover.fabrics.etcd_host import GRACE, HostsSeen
from recover.fabrics.etcd_watch import EtcdWatch
from recover.liveness.board import Board

LOOK_AGAIN = 0.5  # seconds; news come by the watch, this is for when it is late
MAIL_INTERVAL = 0.002  # seconds between two looks for messages
MESSAGE_LIMIT = 1 << 20  # bytes; etcd takes 1.5 MiB in a request
LEASE_PAUSE = 0.05  # seconds between two tries to vote while the host has no lease


class DeclaredDeadError(Exception):
    """The others go on without this rank, which must not act any more."""


class OtherJobError(RuntimeError):
    """What is there under this prefix belongs to another job, or another process is this rank."""


class EtcdFabric:
    """One rank's end.

    `token`: the same for all processes of a job. `host`: the name under which this rank's host holds its lease, if any.
    `hang_limit`: seconds after which a rank that all others wait for in an agreement is declared dead; None: never.
    `grace`: seconds that a host may be without a lease before its ranks are declared dead.
    `end`: called with the reason, from any thread, when this rank was declared dead; it must not return. By default
    the next call raises DeclaredDeadError.
    """

    # For a watcher that looks for agreements which have forgotten a rank: none can here, their results lie in etcd.
    waiting_in: int | None = None

    def __init__(
        self,
        client: EtcdClient,
        rank: int,
        size: int,
        board: Board,
        token: str = "",
        host: str | None = None,
        hang_limit: float | None = None,
        grace: float = GRACE,
        end: Callable[[str], NoReturn] | None = None,
    ) -> None:
        self.rank, self.size, self.board = rank, size, board
        self.lock = threading.RLock()
        self.agreed = Decision.of(())  # the last agreement that this rank was in
        self._client, self._host, self._hang_limit, self._end = client, host, hang_limit, end
        self._news = threading.Condition()
        self._heard_of = self.agreed  # the last decision that there is, as far as this rank knows
        self._notices: list[int] = []  # in the order of their revisions, which is the same for all
        self._over = ""  # why this rank must not act any more
        self._acknowledged: frozenset[int] = frozenset()
        self._agreements = 0
        self._mail: dict[tuple[int, int, int], bytes] = {}  # by agreement, source and tag
        self._mail_seen, self._mail_asked = 0, float("-inf")
        self._enter(token)
        self._hosts = HostsSeen(client, grace)
        self._watch = EtcdWatch(client, "seen/", self._heard)
        self._watch.start()
        self._hosts.start()

    def close(self) -> None:
        """Stop listening. Agreements go on, if slower."""
        self._watch.stop()
        self._hosts.stop()

    def agree(self, word: int) -> int | None:
        with self.lock:
            number = self._agreements + 1
            self.board.enter(self.rank, number)
            look = self._vote(Vote(number, word, self._acknowledged))
            waited, silences, before = 0.0, self._client.unanswered, time.monotonic()
            while self._heard_of.number < number:
                missing = [rank for rank in range(self.size) if look.misses(rank, number)]
                if not missing:
                    look = self._decide(number, look)
                    continue
                look = self._wait(number, look)
                # Only time in which etcd answers and this process runs says something about the others.
                now = time.monotonic()
                waited, before = waited + min(now - before, 2 * LOOK_AGAIN), now
                if silences != self._client.unanswered:
                    waited, silences = 0.0, self._client.unanswered
                if self._hang_limit is not None and waited > self._hang_limit:
                    self._declare_missing(number, missing)
            # Taken once: if the others take this rank for dead, they may go on at any moment.
            decision = self._heard_of
            if decision.number > number:
                self._leave(
                    f"agreement {decision.number} was decided without this rank, which is at {number}"
                )
            if self.rank in decision.dead:
                self._leave(f"agreement {number} counts this rank among the dead")
            self._agreements, self.agreed = number, decision
            self.board.finish(self.rank, number)
            return decision.word

    def failed(self) -> frozenset[int]:
        with self._news:
            return frozenset(self._notices)

    def acknowledge(self, only: frozenset[int] | None = None) -> frozenset[int]:
        with self.lock:
            with self._news:
                notices = list(self._notices)
            count = 0
            while count < len(notices) and (only is None or notices[count] in only):
                count += 1
            self._acknowledged |= frozenset(notices[:count])
            return self._acknowledged

    def send(self, data: bytes, to: int, tag: int) -> _Sent:
        """There until the next agreement is decided, and to be received by then."""
        if len(data) > MESSAGE_LIMIT:
            raise ValueError(
                f"a message of {len(data)} bytes to rank {to}: etcd takes {MESSAGE_LIMIT} at most; census records must "
                "be small, or the world smaller"
            )
        with self.lock:
            self._check()
            # Once the next agreement is decided it must not come any more: nobody would clean it away.
            guards = [absent(f"{DEAD}{self.rank}"), version_is(DECISION, self._agreements)]
            key = f"mail/{self._agreements}/{to}/{tag}/{self.rank}"
            answer = self._client.txn(guards, [put(key, data)], LOOK)
            if not answer.succeeded:
                self._learn(answer)
                self._leave("the others went on without this rank")
            return _Sent()

    def receive(self, source: int, tag: int) -> _Mail:
        return _Mail(self, source, tag)

    def linger(self, seconds: float) -> None:
        """Nobody needs this rank for the result of an agreement: it is in etcd."""

    def fence(self, rank: int) -> None:
        self.board.kill(rank)
        self.declare(rank, f"fenced by rank {self.rank}")

    def declare(self, rank: int, why: str, *guards: Operation) -> None:
        """`rank` is dead from here on, for all and for good, whatever its process does."""
        declare(self._client, rank, why, *guards)

    def now(self) -> float:
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def fetch(self, agreement: int, source: int, tag: int) -> bytes | None:
        """A message that has come. Raises FabricError if none will."""
        self._check()
        if agreement != self._agreements:
            raise FabricError(f"the message of rank {source} was not received before the next agreement")
        gone, now = source in self.failed(), time.monotonic()
        if (agreement, source, tag) not in self._mail and (gone or now > self._mail_asked + MAIL_INTERVAL):
            self._mail_asked = now
            place = f"mail/{agreement}/{self.rank}/"
            arrived, revision = self._client.get_all(place, self._mail_seen + 1)
            self._mail = {key: data for key, data in self._mail.items() if key[0] == agreement}
            for found in arrived:
                its_tag, its_source = map(int, found.key.removeprefix(place).split("/"))
                self._mail[agreement, its_source, its_tag] = found.value
            self._mail_seen = revision
        data = self._mail.get((agreement, source, tag))
        if data is None and gone:
            raise FabricError(f"rank {source} is dead, and has not sent what was waited for")
        return data

    @property
    def agreements(self) -> int:
        """How many this rank has been through."""
        return self._agreements

    def _enter(self, token: str) -> None:
        """See that this is the job that is meant, and be this rank, for good."""
        digest = hashlib.sha256(token.encode()).hexdigest()
        job = json.dumps({"size": self.size, "token": digest}).encode()
        answer = self._client.txn([absent("job")], [put("job", job)], [get("job")])
        where = f"etcd holds another job under {self._client.prefix}"
        if not answer.succeeded and answer.found[0][0].value != job:
            there = json.loads(answer.found[0][0].value)
            raise OtherJobError(
                f"{where} ({there['size']} ranks; this one has {self.size}); give the job a name of its own, or remove "
                "what a job that has ended left there"
            )
        claim, me = f"claim/{self.rank}", uuid.uuid4().hex.encode()
        answer = self._client.txn([absent(claim)], [put(claim, me)], [get(claim)])
        if not answer.succeeded and answer.found[0][0].value != me:
            raise OtherJobError(
                f"another process is or was rank {self.rank} under {self._client.prefix}; a rank does not come back: "
                "start the job under a new name"
            )

    def _vote(self, vote: Vote) -> Look:
        """Cast it, exactly once."""
        mine = f"vote/{self.rank}"
        guards = [
            absent(f"{DEAD}{self.rank}"),
            version_is(mine, vote.number - 1),
            version_is(DECISION, vote.number - 1),
        ]
        if self._host is not None:
            guards.append(present(f"seen/host/{self._host}"))
        while True:
            self._check()
            answer = self._client.txn(guards, [put(mine, vote.to_bytes()), *LOOK], LOOK)
            look = self._learn(answer)
            cast = look.votes.get(self.rank)
            if answer.succeeded or cast == vote or self._heard_of.number >= vote.number:
                return look
            if look.decided < vote.number - 1:
                raise EtcdError(
                    f"etcd has lost its data: it knows of {look.decided} agreements, and this rank has been through "
                    f"{vote.number - 1}; go on from the last checkpoint, with an etcd that keeps them"
                )
            if cast is not None and cast.number >= vote.number:
                self._leave(f"another process has voted as rank {self.rank}")
            time.sleep(LEASE_PAUSE)  # the lease is gone: its holder gets a new one, or the others declare us

    def _decide(self, number: int, look: Look) -> Look:
        """All the living have voted: write down what follows from it, unless somebody else has, or one more died."""
        votes = [vote for rank, vote in look.votes.items() if rank not in look.dead]
        word: int | None = None
        if all(look.dead <= vote.acknowledged for vote in votes):
            word = -1
            for vote in votes:
                word &= vote.word
        content = {"word": word, "dead": sorted(look.dead), "by": self.rank}
        guards = [version_is(DECISION, number - 1), unchanged_since(DEAD, look.revision)]
        # All the living have voted, so they are through with the messages before it.
        writes = [put(DECISION, json.dumps(content).encode()), delete_all("mail/")]
        return self._learn(self._client.txn(guards, [*writes, *LOOK], LOOK))

    def _wait(self, number: int, look: Look) -> Look:
        """For the decision, or for news that may lead to one."""
        with self._news:
            self._news.wait_for(
                lambda: self._heard_of.number >= number or len(self._notices) > len(look.dead) or self._over,
                LOOK_AGAIN,
            )
            decided = self._heard_of.number >= number
        self._check()
        return look if decided else self._learn(self._client.read(*LOOK))

    def _declare_missing(self, number: int, missing: Iterable[int]) -> None:
        for rank in missing:
            # Not if it has come in the meantime.
            guards = version_is(f"vote/{rank}", number - 1), version_is(DECISION, number - 1)
            self.declare(rank, f"it was waited for in agreement {number} for {self._hang_limit:g} s", *guards)

    def _learn(self, answer: Answer) -> Look:
        """Take in what a look has brought."""
        decision, _, dead = answer.found
        self._heard([*dead, *decision])
        self._check()
        return Look.of(answer)

    def _heard(self, news: Sequence[KeyValue]) -> None:
        """What the watch or an answer tells of deaths and decisions. Both bring the earlier deaths before the later."""
        self._hosts.heard(news)
        mine = None
        with self._news:
            news = [found for found in news if found.version]
            deaths = [found for found in news if found.key.startswith(DEAD)]
            for found in sorted(deaths, key=lambda found: found.modified):
                if (rank := rank_of(found)) == self.rank:
                    mine = found
                elif rank not in self._notices:
                    self._notices.append(rank)
            decision = Decision.of([found for found in news if found.key == DECISION][-1:])
            if decision.number > self._heard_of.number:
                self._heard_of = decision
            if mine is not None:
                self._over = self._over or f"rank {self.rank} was declared dead: {mine.value.decode()}"
            self._news.notify_all()
        if mine is not None and self._end is not None:
            self._end(self._over)

    def _check(self) -> None:
        if self._over:
            self._leave(self._over)

    def _leave(self, why: str) -> NoReturn:
        self._over = self._over or why
        if self._end is not None:
            self._end(why)
        raise DeclaredDeadError(why)


class _Sent:
    data = b""

    def done(self) -> bool:
        return True


class _Mail:
    """A message that is waited for."""

    def __init__(self, fabric: EtcdFabric, source: int, tag: int) -> None:
        self.data = b""
        self._fabric, self._agreement, self._source, self._tag = fabric, fabric.agreements, source, tag
        self._here = False

    def done(self) -> bool:
        if not self._here:
            data = self._fabric.fetch(self._agreement, self._source, self._tag)
            self._here, self.data = data is not None, data or b""
        return self._here
