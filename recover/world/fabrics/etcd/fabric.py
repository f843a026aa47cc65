"""The fabric for where whole hosts vanish: one agreement, one list of the dead, small messages, all as keys in etcd.

Keys, all under the prefix of the client, which is the job's own:

    job                what the job is, so that another one of the same name is refused
    ids                its version: how many replicas were placed later (`recover.world.fabrics.etcd.entry`)
    claim/<rank>       which process is this rank; made once, so nobody comes back under a number that was used
    vote/<rank>        of a replica, by its lowest rank: agreement, word, deaths it has acknowledged, whom it admits
    seen/decision      the last agreement. Its version is the agreement's number: it is written once for each
    seen/dead/<rank>   a death; made once, never taken back
    seen/asking/<rank> it is ready, and asks to join
    seen/ended         the job has come to its end: nobody can join any more
    seen/host/<host>   bound to the host's lease (`host_lease.py`); seen/placed/<host>: its ranks
    mail/...           messages, until the next agreement is decided; seen/told/...: those to all

Every value is signed with the job's token for its key, and checked by its reader (`client.py`).
Keys hold rank and agreement, or the value does: so a member's bytes are of no use in another place, or later.

What is under `seen/` is watched by one rank of every replica, which tells its mates. Votes are not watched: who votes
is told how many there are, and the last one decides.

Agreement k. The lowest rank of a replica speaks for it (`replica_peers.py`): its mates tell it what they
vote, and it votes the AND. The vote counts if, in one transaction: nobody of the replica is declared dead, the leases
of its hosts stand, it has not voted yet, and k - 1 agreements are decided. Where nobody is dead, nobody is let in and
all say the same, which is nearly always, the transaction of the last vote is the decision, too. Otherwise who has read
the votes of all replicas that have lost nobody writes it: the AND of their words, the dead, who joins, and who takes
part from then on; guarded by "k - 1 agreements are decided, and nobody died since that read". Any speaker may. Decision
k + 1 needs the votes of all the living, so all of them have read decision k by then, and one key is enough. Whoever
finds itself dead, or the world further than k, ends: it was stopped, or cut off, and the others went on. No clock takes
part in this; a transaction that is carried out twice, or late, fails its guards.

The decision removes the votes, and all keys of those who have left: of a dead rank nothing is needed any more once a
decision has left it out, since whatever it may still ask for was to be before that decision. So the store does not
grow, however many come and go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from recover.world.fabrics.base import Admission, FabricError, NotAdmittedError
from recover.world.fabrics.etcd import entry
from recover.world.fabrics.etcd.agreement import (
    CLAIM,
    DEAD,
    DECISION,
    GLANCE,
    LOOK,
    OPERATIONS,
    VOTE,
    Decision,
    Glance,
    Look,
    Vote,
    cast,
    check_kept,
    decided,
    declare,
    first_of,
    intact,
    key_of,
    mates,
    speakers,
    unanimous,
    whole,
)
from recover.world.fabrics.etcd.client import (
    Answer,
    EtcdClient,
    KeyValue,
    LostDataError,
    Operation,
    absent,
    get,
    present,
    put,
    unchanged_since,
    value_is,
    version_is,
)
from recover.world.fabrics.etcd.host_lease import GRACE, HOST, HostsSeen
from recover.world.fabrics.etcd.membership_cache import WITH_REPLICA, News
from recover.world.fabrics.etcd.messages import Expected, Fetch, Mailbox, Sent, check_size, mail_key, told_key
from recover.world.fabrics.etcd.replica_peers import Said, Speaker, Spoken
from recover.world.fabrics.etcd.watch import EtcdWatch
from recover.world.liveness.board import Board

LOOK_AGAIN = 0.5  # seconds; news come by the watch, this is for when it is late
LEASE_PAUSE = 0.05  # seconds between two tries to vote while the host has no lease
ORPHANED = 1.0  # seconds after the death of a mate, in which a rank may end in its own way


class DeclaredDeadError(Exception):
    """The others go on without this rank, which must not act any more."""


class EtcdFabric:
    """One rank's end. A rank from `size` on is one that joins: it takes part once `ask` has returned.

    `token`: the same for all processes of a job. `host`: the name under which this rank's host holds its lease, if any.
    `hang_limit`: seconds after which a rank that all others wait for in an agreement is declared dead; None: never.
    `grace`: seconds that a host may be without a lease in etcd before its ranks are declared dead.
    `end`: called with the reason, from any thread, when this rank was declared dead; it must not return. By default
    the next call raises DeclaredDeadError.
    `address`: of this host, for its mates. `limit`: of ranks at work; who asks beyond it stands by until a loss.
    `admits`: whether ranks may join after the start; otherwise nobody who asks is heard.
    """

    waiting_in: int | None = None  # no agreement can forget a rank here: their results lie in etcd

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
        replica_size: int = 1,
        address: str = "127.0.0.1",
        limit: int | None = None,
        admits: bool = False,
    ) -> None:
        self.rank, self.size, self.replica_size, self.board = rank, size, replica_size, board
        self.lock = threading.RLock()
        self.agreed = Decision.before_all(size)  # the last agreement that this rank was in
        self._client, self._host, self._hang_limit, self._end = client, host, hang_limit, end
        self._replica, self._limit, self._admits = mates(rank, replica_size), limit, admits
        self._news = News(rank, self.agreed, rank < size, self._replica)
        self._acknowledged: frozenset[int] = frozenset()
        self._mailbox = Mailbox(client, rank)
        self._hosts = HostsSeen(client, grace)
        self._alone_since = 0.0
        first = self._replica[0]
        speaks = rank == first and replica_size > 1
        self._speaker = Speaker(address, token, self._news.wake) if speaks else None
        self._spoken = Spoken(client, "seen/", self._heard, rank, first, token) if rank != first else None
        self._watch = self._spoken or EtcdWatch(client, "seen/", self._heard_by_watch)
        job = entry.EnteredJob(size, replica_size, admits)
        where = self._speaker.address if self._speaker else ""
        try:
            self._claim = entry.enter(client, job, rank, where)
            self._watch.start()
        except BaseException:
            self.close()
            raise
        if rank == first:
            self._hosts.start()

    def close(self) -> None:
        """Stop listening. Agreements go on, if slower."""
        self._watch.stop()
        if self._speaker is not None:
            self._speaker.close()
        self._hosts.stop()

    @property
    def agreements(self) -> int:
        return self.agreed.number

    @property
    def participants(self) -> frozenset[int]:
        return self.agreed.participants

    def agree(self, word: int, admit: frozenset[int] = frozenset()) -> int | None:
        with self.lock:
            number = self.agreed.number + 1
            self.board.enter(self.rank, number)
            vote = Vote(word, self._acknowledged & self.participants, admit, number)
            said = Said(vote, self._host)
            if self._spoken is not None:
                self._leave_it_to_the_speaker(said, self._spoken)
            elif all_said := self._gathered(said):
                vote = Vote.of_all([one.vote for one in all_said])
                self._see_through(number, self._decide_if_unanimous(self._vote(number, all_said), vote))
            # Once: if they take this rank for dead, the others may go on any time.
            decision = self._news.decision
            if decision.number > number:
                self._leave(f"agreement {decision.number} was decided without this rank, at {number}")
            if self.rank in decision.dead:
                self._leave(f"agreement {number} counts this rank among the dead")
            self.agreed = decision
            self.board.finish(self.rank, number)
            return decision.word

    def asking(self) -> frozenset[int]:
        if not self._admits:
            return frozenset()
        there = self._news.asking - self.participants - self.failed()
        # One whose host is about to be given up need not be let in first.
        ready = whole(there - self._hosts.missed(), self.replica_size)
        at_work = intact(self.participants, self.failed(), self.replica_size)
        return first_of(ready, None if self._limit is None else self._limit - len(at_work))

    def ask(self) -> Admission:
        size = self.replica_size
        with self.lock:
            self._check()
            entry.ask(self._client, self.rank, self._claim)
            while not self._news.admitted():
                if self._news.ended or not intact(self._news.decision.participants, self.failed(), size):
                    raise NotAdmittedError(self._news.ended or "all replicas of the job are dead")
                self._news.wait_for(lambda: self._news.admitted() or self._news.ended, LOOK_AGAIN)
                if self._news.admitted():  # all others wait for it now
                    break
                answer = self._client.read(*GLANCE, get(key_of(CLAIM, self.rank)))
                self._learn(answer)
                if not answer.found[3]:
                    self._leave(f"{self._news.lost}: rank {self.rank} is forgotten")
            self._check()
            # The next agreement needs this rank's vote, so there is no later decision.
            self._news.takes_part, self.agreed = True, self._news.decision
            return Admission(self.agreed.number, self.agreed.participants)

    def failed(self) -> frozenset[int]:
        return frozenset(self._news.dead)

    def acknowledge(self, only: frozenset[int] | None = None) -> frozenset[int]:
        with self.lock:
            notices, count = self._news.dead, 0
            while count < len(notices) and (only is None or notices[count] in only):
                count += 1
            self._acknowledged |= frozenset(notices[:count])
            return self._acknowledged

    def send(self, data: bytes, to: int, tag: int) -> Sent:
        """There until the next agreement is decided, and to be received by then."""
        return self._post(mail_key(self.agreed.number, to, tag, self.rank), data)

    def send_to_all(self, data: bytes, to: Sequence[int], tag: int) -> list[Sent]:
        return [self._post(told_key(self.agreed.number, tag, self.rank), data)]

    def _post(self, key: str, data: bytes) -> Sent:
        check_size(data, self.rank)
        with self.lock:
            self._check()
            # Once the next agreement is decided it must not come any more: nobody would clean it away.
            guards = [absent(key_of(DEAD, self.rank)), version_is(DECISION, self.agreed.number)]
            answer = self._client.txn(guards, [put(key, data)], GLANCE)
            if not answer.succeeded:
                self._learn(answer)
                self._leave("the others went on without this rank")
            return Sent()

    def receive(self, source: int, tag: int) -> Expected:
        return self._expected(self._mailbox.fetch, source, tag)

    def receive_as_all(self, source: int, tag: int) -> Expected:
        return self._expected(self._mailbox.told, source, tag)

    def _expected(self, look: Fetch, source: int, tag: int) -> Expected:
        agreement = self.agreed.number

        def fetch() -> bytes | None:
            self._check()
            if agreement != self.agreed.number:
                raise FabricError(f"the message of rank {source} was not received before the next agreement")
            return look(agreement, source, tag, source in self.failed())

        return Expected(fetch)

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

    def _is_decided(self, number: int) -> bool:
        return self._news.decision.number >= number

    def _leave_it_to_the_speaker(self, said: Said, spoken: Spoken) -> None:
        self._check()
        spoken.say(said)
        while not self._wait(said.number):
            self._glance()
            spoken.say(said)

    def _gathered(self, mine: Said) -> list[Said]:
        """What all of this replica say; nothing if the agreement was decided without it."""
        number, mates_said = mine.number, self._speaker.said if self._speaker else lambda number: {}
        while len(said := mates_said(number)) < self.replica_size - 1:
            if self._wait(number, lambda: len(mates_said(number)) == self.replica_size - 1):
                return []
            if len(mates_said(number)) < self.replica_size - 1:
                self._glance()  # whether they live
        return [mine, *said.values()]

    def _vote(self, number: int, said: Sequence[Said]) -> Glance:
        """Cast it for all of them, exactly once. If it is the last one, and like all others, that decides."""
        mine, vote = key_of(VOTE, self.rank), Vote.of_all([one.vote for one in said])
        write = cast(self.rank, vote, self.participants, self.replica_size)
        guards = [absent(mine), version_is(DECISION, number - 1)]
        guards += [absent(key_of(DEAD, rank)) for rank in self._replica]
        guards += [present(f"{HOST}{host}") for host in {one.host for one in said} if host is not None]
        while True:
            self._check()
            answer = self._client.txn(guards, [*write, *GLANCE], [*GLANCE, get(mine)])
            glance = self._learn(answer)
            if answer.succeeded or self._is_decided(number):
                return glance
            check_kept(glance, number - 1)
            for there in answer.found[3]:
                if there.value == vote.to_bytes():
                    return glance  # the answer was lost
                if Vote.from_bytes(there.value).number != number:
                    self._client.remove_forged(
                        [there]
                    )  # somebody has put back a vote of an earlier agreement
                    continue
                self._leave(f"another process has voted as rank {self.rank}")
            time.sleep(LEASE_PAUSE)  # a lease is gone: its holder gets a new one, or the others declare us

    def _decide_if_unanimous(self, glance: Glance, vote: Vote) -> Glance:
        """Where too many vote for each to compare all: the last one does, and need not read them."""
        voters = speakers(self.participants, self.replica_size)
        if self._is_decided(vote.number) or glance.dead or glance.cast < len(voters):
            return glance
        decision = unanimous(self.rank, vote, self.participants, self.replica_size, OPERATIONS)
        if decision is None:
            return glance
        guards = [version_is(DECISION, vote.number - 1), value_is(key_of(VOTE, self.rank), vote.to_bytes())]
        return self._learn(self._client.txn([*guards, *decision[0]], [*decision[1], *GLANCE], GLANCE))

    def _see_through(self, number: int, glance: Glance) -> None:
        """Wait for the decision, or write it."""
        waited, silences, before = 0.0, self._client.unanswered, time.monotonic()
        while not self._is_decided(number):
            voters = self._voters(glance)
            # As many as there should be; whose they are, a look tells. Who has lost a mate has no say any more.
            if self.rank in voters and glance.cast >= len(voters):
                look = self._look()
                glance, voters = look.glance, self._voters(look.glance)
                if self.rank in voters <= look.votes.keys() and glance.decided == number - 1:
                    glance = self._decide(number, look)
                    continue
            known = glance.dead
            if self._wait(number, lambda: not self.participants & self.failed() <= known):  # noqa: B023
                return
            glance = self._glance()
            # Only time in which etcd answers and this process runs says something about the others.
            now = time.monotonic()
            waited, before = waited + min(now - before, 2 * LOOK_AGAIN), now
            if silences != self._client.unanswered:
                waited, silences = 0.0, self._client.unanswered
            if self._hang_limit is not None and waited > self._hang_limit:
                look = self._look()
                self._declare_missing(number, self._voters(look.glance) - look.votes.keys())

    def _voters(self, glance: Glance) -> frozenset[int]:
        living = intact(self.participants, glance.dead, self.replica_size)
        return speakers(living, self.replica_size)

    def _glance(self) -> Glance:
        return self._learn(self._client.read(*GLANCE))

    def _look(self) -> Look:
        answer = self._client.read(*LOOK)
        self._learn(answer)
        return Look.of(answer)

    def _decide(self, number: int, look: Look) -> Glance:
        """All the living have voted: write down what follows from it, unless somebody else has, or one more died."""
        value, cleaned = decided(look, self.participants, self.replica_size, self.rank)
        guards = [version_is(DECISION, number - 1), unchanged_since(DEAD, look.glance.revision)]
        return self._learn(self._client.txn(guards, [put(DECISION, value), *cleaned, *GLANCE], GLANCE))

    def _wait(self, number: int, or_for: Callable[[], bool] = lambda: False) -> bool:
        """For the decision, or for news that may lead to one. Whether it is there; if not, it may be time to ask."""
        self._news.wait_for(lambda: self._is_decided(number) or or_for(), LOOK_AGAIN)
        self._check()
        return self._is_decided(number)

    def _declare_missing(self, number: int, missing: Iterable[int]) -> None:
        for rank in missing:
            # Not if it has come in the meantime.
            guards = absent(key_of(VOTE, rank)), version_is(DECISION, number - 1)
            self.declare(rank, f"it was waited for in agreement {number} for {self._hang_limit:g} s", *guards)

    def _learn(self, answer: Answer) -> Glance:
        """Take in what a glance has brought. Raises LostDataError if nobody can know any more what was decided."""
        decision, dead = answer.found[:2]
        if DECISION in {found.key for found in answer.forged} or not all(map(Decision.in_place, decision)):
            raise LostDataError(
                f"{self._client.prefix}{DECISION} in etcd was overwritten without the job's token: what was agreed on "
                "is lost; go on from the last checkpoint, with an etcd that others cannot write to"
            )
        # Guards ask whether these keys are there, not who wrote them.
        self._client.remove_forged(f for f in answer.forged if f.key.startswith((DEAD, VOTE)))
        self._heard([*dead, *decision])
        self._check()
        return Glance.of(answer)

    def _heard_by_watch(self, news: Sequence[KeyValue]) -> None:
        if self._speaker is not None:
            self._speaker.tell(news)
        self._heard(news)

    def _heard(self, news: Sequence[KeyValue]) -> None:
        self._hosts.heard(news)
        self._mailbox.heard(news)
        self._news.hear(news)
        if self._news.over and self._end is not None:
            self._end(self._news.over)

    def _check(self) -> None:
        if self._news.over:
            self._leave(self._news.over)
        if lost := self.failed().intersection(self._replica):
            # Whoever watches its mates ends by itself.
            self._alone_since = self._alone_since or time.monotonic()
            if time.monotonic() > self._alone_since + ORPHANED:
                self._leave(f"{WITH_REPLICA}: ranks {sorted(lost)} of it are dead")

    def _leave(self, why: str) -> NoReturn:
        self._news.over = self._news.over or why
        if self._end is not None:
            self._end(why)
        raise DeclaredDeadError(why)
