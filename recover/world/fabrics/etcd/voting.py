"""One agreement as a rank runs it in etcd: vote, wait for the decision, and write it where this
rank is the last.

`fabric.py` explains the protocol. What a transaction holds is in `agreement.py`; this module sends
them, in an order that stays right if any of them is carried out late, twice, or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from recover.world.fabrics.etcd.agreement import (
    DEAD,
    DECISION,
    OPERATIONS,
    VOTE,
    VOTE_COUNT,
    VOTE_SNAPSHOT,
    Decision,
    Vote,
    VoteCount,
    VoteSnapshot,
    cast,
    check_kept,
    decided,
    declare,
    intact,
    key_of,
    leaders,
    unanimous,
)
from recover.world.fabrics.etcd.client import (
    Answer,
    EtcdClient,
    KeyValue,
    LostDataError,
    absent,
    get,
    present,
    put,
    unchanged_since,
    value_is,
    version_is,
)
from recover.world.fabrics.etcd.host_lease import HOST
from recover.world.fabrics.etcd.membership_cache import MembershipCache
from recover.world.fabrics.etcd.replica_peers import PeerVote, ReplicaFollower, ReplicaLeader

# Seconds between two reads of etcd while a rank waits. Changes come by the watch; this is for a
# late watch.
READ_AGAIN = 0.5
# Seconds between two attempts to vote while the host has no lease.
LEASE_PAUSE = 0.05


class EtcdAgreement:
    """Runs the agreements of one rank. Raises DeclaredDeadError once this rank was declared dead.

    `leader`: the connection to the other ranks of this replica, if this rank is its lowest and
    there are others. `follower`: the connection to the leader, for all other ranks. `apply`: takes
    changes into the caches of this rank.
    """

    def __init__(
        self,
        client: EtcdClient,
        rank: int,
        replica: range,
        cache: MembershipCache,
        apply: Callable[[Sequence[KeyValue]], None],
        leader: ReplicaLeader | None,
        follower: ReplicaFollower | None,
        host: str | None,
        hang_limit: float | None,
    ) -> None:
        self._client, self._rank, self._replica, self._cache, self._apply = (
            client,
            rank,
            replica,
            cache,
            apply,
        )
        self._leader, self._follower = leader, follower
        self._host, self._hang_limit = host, hang_limit
        self._participants = frozenset[int]()  # of the agreement under way

    def agree(self, vote: Vote, participants: frozenset[int]) -> Decision:
        """Run agreement `vote.number` among `participants` and return its decision."""
        self._participants = participants
        mine = PeerVote(vote, self._host)
        if self._follower is not None:
            self._vote_by_leader(mine, self._follower)
        elif votes := self._gather(mine):
            vote = Vote.of_all([one.vote for one in votes])
            self._see_through(vote.number, self._decide_if_unanimous(self._vote(votes), vote))
        # Read once: if the others take this rank for dead, the next agreement may be decided at any
        # time.
        decision = self._cache.decision
        if decision.number > vote.number:
            self._cache.end(f"agreement {decision.number} was decided without this rank, at {vote.number}")
        if self._rank in decision.dead:
            self._cache.end(f"agreement {vote.number} counts this rank among the dead")
        return decision

    def read_count(self) -> VoteCount:
        return self.learn(self._client.read(*VOTE_COUNT))

    def learn(self, answer: Answer) -> VoteCount:
        """Apply an answer that begins with VOTE_COUNT. Raises LostDataError if the last decision
        was overwritten."""
        decision, dead = answer.found[:2]
        if DECISION in {found.key for found in answer.forged} or not all(map(Decision.in_place, decision)):
            raise LostDataError(
                f"{self._client.prefix}{DECISION} in etcd was overwritten without the job's token: what was agreed on "
                "is lost; resume from the last checkpoint, with an etcd that others cannot write to"
            )
        # Guards test whether these keys exist, not who wrote them.
        self._client.remove_forged(f for f in answer.forged if f.key.startswith((DEAD, VOTE)))
        self._apply([*dead, *decision])
        self._cache.check()
        return VoteCount.of(answer)

    def _is_decided(self, number: int) -> bool:
        return self._cache.decision.number >= number

    def _vote_by_leader(self, mine: PeerVote, follower: ReplicaFollower) -> None:
        self._cache.check()
        follower.send_vote(mine)
        while not self._wait(mine.number):
            self.read_count()
            follower.send_vote(mine)  # the connection may have been lost with the first one

    def _gather(self, mine: PeerVote) -> list[PeerVote]:
        """The votes of all ranks of this replica; nothing if the agreement was decided without it."""
        if self._leader is None:
            return [mine]
        leader, number, others = self._leader, mine.number, len(self._replica) - 1
        while len(votes := leader.votes(number)) < others:
            if self._wait(number, lambda: len(leader.votes(number)) == others):
                return []
            if len(leader.votes(number)) < others:
                self.read_count()  # one of them may be dead
        return [mine, *votes.values()]

    def _vote(self, votes: Sequence[PeerVote]) -> VoteCount:
        """Cast the vote of the replica exactly once.

        If it is the last, and all are equal, this decides.

        The guards hold for exactly one write: there is no vote of this replica yet, the agreement
        is open, no rank of the replica is declared dead and the leases of its hosts stand. A vote
        that etcd carries out late fails them.
        """
        mine, vote = key_of(VOTE, self._rank), Vote.of_all([one.vote for one in votes])
        write = cast(self._rank, vote, self._participants, len(self._replica))
        guards = [absent(mine), version_is(DECISION, vote.number - 1)]
        guards += [absent(key_of(DEAD, rank)) for rank in self._replica]
        guards += [present(f"{HOST}{host}") for host in {one.host for one in votes} if host is not None]
        while True:
            self._cache.check()
            answer = self._client.txn(guards, [*write, *VOTE_COUNT], [*VOTE_COUNT, get(mine)])
            count = self.learn(answer)
            if answer.succeeded or self._is_decided(vote.number):
                return count
            check_kept(count, vote.number - 1)
            for there in answer.found[3]:
                if there.value == vote.to_bytes():
                    return count  # an earlier attempt was carried out, and its answer was lost
                if Vote.from_bytes(there.value).number != vote.number:
                    self._client.remove_forged([there])  # a vote of an earlier agreement that was put back
                    continue
                self._cache.end(f"another process has voted as rank {self._rank}")
            # A lease is missing: its holder gets a new one, or the others declare this host dead.
            time.sleep(LEASE_PAUSE)

    def _decide_if_unanimous(self, count: VoteCount, vote: Vote) -> VoteCount:
        """If there are too many votes for each voter to compare all, the last voter compares them,
        without reading them."""
        voters = leaders(self._participants, len(self._replica))
        if self._is_decided(vote.number) or count.dead or count.cast < len(voters):
            return count
        decision = unanimous(self._rank, vote, self._participants, len(self._replica), OPERATIONS)
        if decision is None:
            return count
        guards = [version_is(DECISION, vote.number - 1), value_is(key_of(VOTE, self._rank), vote.to_bytes())]
        return self.learn(self._client.txn([*guards, *decision[0]], [*decision[1], *VOTE_COUNT], VOTE_COUNT))

    def _see_through(self, number: int, count: VoteCount) -> None:
        """Wait for the decision, or write it."""
        waited, silences, before = 0.0, self._client.unanswered, time.monotonic()
        while not self._is_decided(number):
            voters = self._voters(count)
            # The count says that all may have voted; the snapshot shows whether these are the votes
            # of all voters. The leader of a replica that has lost a rank has no vote any more.
            if self._rank in voters and count.cast >= len(voters):
                snapshot = self._read_snapshot()
                count, voters = snapshot.count, self._voters(snapshot.count)
                if self._rank in voters <= snapshot.votes.keys() and count.decided == number - 1:
                    count = self._decide(number, snapshot)
                    continue
            known = count.dead
            if self._wait(number, lambda: not self._dead_participants() <= known):  # noqa: B023
                return
            count = self.read_count()
            # Only time in which etcd answers and this process runs counts as waiting for others.
            now = time.monotonic()
            waited, before = waited + min(now - before, 2 * READ_AGAIN), now
            if silences != self._client.unanswered:
                waited, silences = 0.0, self._client.unanswered
            if self._hang_limit is not None and waited > self._hang_limit:
                snapshot = self._read_snapshot()
                self._declare_missing(number, self._voters(snapshot.count) - snapshot.votes.keys())

    def _dead_participants(self) -> frozenset[int]:
        return self._participants & frozenset(self._cache.dead)

    def _voters(self, count: VoteCount) -> frozenset[int]:
        living = intact(self._participants, count.dead, len(self._replica))
        return leaders(living, len(self._replica))

    def _read_snapshot(self) -> VoteSnapshot:
        answer = self._client.read(*VOTE_SNAPSHOT)
        self.learn(answer)
        return VoteSnapshot.of(answer)

    def _decide(self, number: int, snapshot: VoteSnapshot) -> VoteCount:
        """Write the decision that follows from the votes of all living replicas.

        It fails if another rank has written it, or if a death was declared after the snapshot: that
        replica's vote must not count, and the deciding rank has to look again.
        """
        value, cleaned = decided(snapshot, self._participants, len(self._replica), self._rank)
        guards = [version_is(DECISION, number - 1), unchanged_since(DEAD, snapshot.count.revision)]
        return self.learn(self._client.txn(guards, [put(DECISION, value), *cleaned, *VOTE_COUNT], VOTE_COUNT))

    def _wait(self, number: int, or_for: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the decision, or until `or_for()`, or until it is time to read etcd.

        Returns whether it is decided.
        """
        self._cache.wait_for(lambda: self._is_decided(number) or or_for(), READ_AGAIN)
        self._cache.check()
        return self._is_decided(number)

    def _declare_missing(self, number: int, missing: Iterable[int]) -> None:
        for rank in missing:
            # The guards hold only if its vote has not arrived meanwhile.
            guards = absent(key_of(VOTE, rank)), version_is(DECISION, number - 1)
            why = f"it was waited for in agreement {number} for {self._hang_limit:g} s"
            declare(self._client, rank, why, *guards)
