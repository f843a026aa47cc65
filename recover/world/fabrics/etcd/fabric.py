"""The fabric for jobs that must survive the loss of whole hosts: agreements, deaths and small
messages as keys in etcd.

Keys, all under the prefix of the client, which is the job's own:

    job                the facts of the job, so that another job of the same name is refused
    ids                its version: how many replicas were placed after the start (`recover.world.fabrics.etcd.entry`)
    claim/<rank>       which process is this rank; created once, so no process reuses a number
    vote/<rank>        of a replica, by its lowest rank: agreement, word, acknowledged deaths, ranks that it admits
    seen/decision      the last agreement. Its version is the agreement's number: it is written once for each
    seen/dead/<rank>   a death; created once, never taken back
    seen/asking/<rank> the rank is ready, and asks to join
    seen/ended         the job has ended: no replica can join any more
    seen/host/<host>   bound to the host's lease (`host_lease.py`); seen/placed/<host>: its ranks
    mail/...           messages, until the next agreement is decided; seen/told/...: messages to all

Every value is signed with the job's token for its key, and checked by its reader (`client.py`). The
key or the value names rank and agreement: so the bytes of a member are of no use under another key,
or later.

One rank of every replica watches `seen/` and passes changes on to the other ranks of the replica.
Votes are not watched: the answer to a vote says how many votes there are, and the last voter
decides.

Agreement k (`voting.py`). The lowest rank of a replica is its leader (`replica_peers.py`): the
other ranks send it their votes, and it votes the AND. The vote counts if, in one transaction: no
rank of the replica is declared dead, the leases of its hosts stand, the replica has not voted yet,
and k - 1 agreements are decided. If no rank is dead or admitted and all votes are equal, which is
nearly always so, the transaction of the last vote is also the decision. Otherwise a leader that has
read the votes of all replicas without a loss writes the decision: the AND of their words, the dead,
the ranks that join, and the participants afterwards; guarded by "k - 1 agreements are decided, and
no death was declared since that read". Any leader may. Decision k + 1 needs the votes of all living
replicas, so all of them have read decision k by then, and one key is enough. A rank that finds
itself dead, or the world beyond k, ends: it was stopped, or cut off, and the others continued. No
clock takes part in this; a transaction that is carried out twice, or late, fails its guards.

The decision deletes the votes, and all keys of ranks that have left: nothing of a dead rank is
needed once a decision has excluded it, since every request of that rank is guarded by an earlier
decision. So the store does not grow, however many ranks come and go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from recover.world.fabrics.base import Admission, DeclaredDeadError, FabricError, NotAdmittedError
from recover.world.fabrics.etcd import entry
from recover.world.fabrics.etcd.agreement import (
    CLAIM,
    DEAD,
    DECISION,
    VOTE_COUNT,
    Decision,
    Vote,
    declare,
    first_of,
    intact,
    key_of,
    replica_ranks,
    whole,
)
from recover.world.fabrics.etcd.client import EtcdClient, KeyValue, Operation, absent, get, put, version_is
from recover.world.fabrics.etcd.host_lease import GRACE, HostLeases
from recover.world.fabrics.etcd.membership_cache import MembershipCache
from recover.world.fabrics.etcd.messages import Expected, Fetch, Mailbox, Sent, check_size, mail_key, told_key
from recover.world.fabrics.etcd.replica_peers import ReplicaFollower, ReplicaLeader
from recover.world.fabrics.etcd.voting import READ_AGAIN, EtcdAgreement
from recover.world.fabrics.etcd.watch import EtcdWatch
from recover.world.liveness.board import Board

__all__ = ["DeclaredDeadError", "EtcdFabric"]


class EtcdFabric:
    """The fabric of one rank.

    A rank from `size` on joins later: it takes part once `ask` has returned.

    Once this rank was declared dead, every call raises DeclaredDeadError.

    `token`: the same for all processes of a job. `host`: the name under which this rank's host
    holds its lease, if any. `hang_limit`: seconds after which a rank that all others wait for in an
    agreement is declared dead; None: never. `grace`: seconds that a host may be without a lease in
    etcd before its ranks are declared dead. `address`: of this host, for the other ranks of the
    replica. `limit`: of ranks at work; further ranks that ask stand by until a loss. `admits`:
    whether ranks may join after the start; otherwise no rank that asks is admitted.
    """

    waiting_in: int | None = None  # no agreement can forget a rank here: the results are in etcd

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
        replica_size: int = 1,
        address: str = "127.0.0.1",
        limit: int | None = None,
        admits: bool = False,
    ) -> None:
        self.rank, self.size, self.replica_size, self.board = rank, size, replica_size, board
        self.lock = threading.RLock()
        self.agreed = Decision.before_all(size)  # the last agreement that this rank was in
        self._client, self._limit, self._admits = client, limit, admits
        replica = replica_ranks(rank, replica_size)
        self._cache = MembershipCache(rank, self.agreed, rank < size, replica)
        self._acknowledged: frozenset[int] = frozenset()
        self._mailbox = Mailbox(client, rank)
        self._hosts = HostLeases(client, grace)
        first = replica[0]
        leads = rank == first and replica_size > 1
        self._leader = ReplicaLeader(address, token, self._cache.wake) if leads else None
        follower = (
            ReplicaFollower(client, "seen/", self._apply, rank, first, token) if rank != first else None
        )
        self._watch = follower or EtcdWatch(client, "seen/", self._apply_and_pass_on)
        self._agreement = EtcdAgreement(
            client, rank, replica, self._cache, self._apply, self._leader, follower, host, hang_limit
        )
        job = entry.EnteredJob(size, replica_size, admits)
        where = self._leader.address if self._leader else ""
        try:
            # The claim comes first: a second process of this rank must fail before it watches or
            # votes.
            self._claim = entry.enter(client, job, rank, where)
            self._watch.start()
        except BaseException:
            self.close()
            raise
        if rank == first:
            self._hosts.start()

    def close(self) -> None:
        """Stop the watch. Agreements still work, but slower: they find changes by reading."""
        self._watch.stop()
        if self._leader is not None:
            self._leader.close()
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
            self.agreed = self._agreement.agree(vote, self.participants)
            self.board.finish(self.rank, number)
            return self.agreed.word

    def asking(self) -> frozenset[int]:
        if not self._admits:
            return frozenset()
        dead = frozenset(self._cache.dead)
        there = self._cache.asking - self.participants - dead
        # A rank whose host is about to be declared dead need not be admitted before that.
        ready = whole(there - self._hosts.missed(), self.replica_size)
        at_work = intact(self.participants, dead, self.replica_size)
        return first_of(ready, None if self._limit is None else self._limit - len(at_work))

    def ask(self) -> Admission:
        cache = self._cache
        with self.lock:
            cache.check()
            entry.ask(self._client, self.rank, self._claim)
            while not cache.admitted():
                members = cache.decision.participants
                if cache.ended or not intact(members, frozenset(cache.dead), self.replica_size):
                    raise NotAdmittedError(cache.ended or "all replicas of the job are dead")
                cache.wait_for(lambda: cache.admitted() or cache.ended, READ_AGAIN)
                if cache.admitted():  # all members wait for this rank now
                    break
                answer = self._client.read(*VOTE_COUNT, get(key_of(CLAIM, self.rank)))
                self._agreement.learn(answer)
                if not answer.found[3]:
                    cache.end(f"{cache.lost}: rank {self.rank} is forgotten")
            cache.check()
            # The next agreement needs this rank's vote, so there is no later decision than the one
            # that admitted it.
            cache.takes_part, self.agreed = True, cache.decision
            return Admission(self.agreed.number, self.agreed.participants)

    def failed(self) -> frozenset[int]:
        if self._cache.fatal:
            self._cache.end(self._cache.fatal)
        return frozenset(self._cache.dead)

    def look_for_exits(self, now: float) -> None:
        """The agent of the host declares the deaths of its ranks."""

    def heartbeats(self) -> Mapping[int, int]:
        return {}  # read for Open MPI's communicators only

    def acknowledge(self, only: frozenset[int] | None = None) -> frozenset[int]:
        with self.lock:
            notices, count = self._cache.dead, 0
            while count < len(notices) and (only is None or notices[count] in only):
                count += 1
            self._acknowledged |= frozenset(notices[:count])
            return self._acknowledged

    def send(self, data: bytes, to: int, tag: int) -> Sent:
        """The message exists until the next agreement is decided, and must be received by then."""
        return self._post(mail_key(self.agreed.number, to, tag, self.rank), data)

    def send_to_all(self, data: bytes, to: Sequence[int], tag: int) -> list[Sent]:
        return [self._post(told_key(self.agreed.number, tag, self.rank), data)]

    def _post(self, key: str, data: bytes) -> Sent:
        check_size(data, self.rank)
        with self.lock:
            self._cache.check()
            # The next decision deletes all messages. A message written after it would never be deleted.
            guards = [absent(key_of(DEAD, self.rank)), version_is(DECISION, self.agreed.number)]
            answer = self._client.txn(guards, [put(key, data)], VOTE_COUNT)
            if not answer.succeeded:
                self._agreement.learn(answer)
                self._cache.end("the others went on without this rank")
            return Sent()

    def receive(self, source: int, tag: int) -> Expected:
        return self._expected(self._mailbox.fetch, source, tag)

    def receive_as_all(self, source: int, tag: int) -> Expected:
        return self._expected(self._mailbox.told, source, tag)

    def _expected(self, look: Fetch, source: int, tag: int) -> Expected:
        agreement = self.agreed.number

        def fetch() -> bytes | None:
            self._cache.check()
            if agreement != self.agreed.number:
                raise FabricError(f"the message of rank {source} was not received before the next agreement")
            return look(agreement, source, tag, source in self._cache.dead)

        return Expected(fetch)

    def linger(self, seconds: float) -> None:
        """The others find the result of an agreement in etcd: they do not need this rank for it."""

    def fence(self, rank: int) -> None:
        self.board.kill(rank)
        self.declare(rank, f"fenced by rank {self.rank}")

    def declare(self, rank: int, why: str, *guards: Operation) -> None:
        """Declare `rank` dead, for all ranks and permanently, whatever its process does."""
        declare(self._client, rank, why, *guards)

    def now(self) -> float:
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def _apply_and_pass_on(self, changes: Sequence[KeyValue]) -> None:
        if self._leader is not None:
            self._leader.pass_on(changes)
        self._apply(changes)

    def _apply(self, changes: Sequence[KeyValue]) -> None:
        """Take in changes of keys. On the thread of the watch, or on the caller's."""
        self._hosts.apply(changes)
        self._mailbox.apply(changes)
        self._cache.apply(changes)
