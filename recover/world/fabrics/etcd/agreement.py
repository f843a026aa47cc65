"""The contents of an agreement in etcd: keys, votes, decisions, and the transactions that read and
write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recover.world.fabrics.etcd.client import (
    Answer,
    EtcdClient,
    KeyValue,
    LostDataError,
    Operation,
    absent,
    count,
    delete_all,
    delete_range,
    either,
    get,
    get_all,
    none_under,
    present,
    put,
    value_is,
    version_is,
)

DECISION, ENDED = "seen/decision", "seen/ended"
DEAD, ASKING, CLAIM, VOTE = "seen/dead/", "seen/asking/", "claim/", "vote/"
TOLD = "seen/told/"
# Once an agreement is decided, all living ranks have voted, so they have received all messages
# before it.
THROUGH = (delete_all(VOTE), delete_all("mail/"), delete_all(TOLD))
# Every transaction about an agreement reads this: how many have voted, not what they voted.
VOTE_COUNT = (get(DECISION), get_all(DEAD), count(VOTE))
# All of it at one revision, for a rank that is about to decide.
VOTE_SNAPSHOT = (*VOTE_COUNT, get_all(VOTE), get_all(ASKING))
# Replicas that one decision may delete and admit, at the most: etcd takes 128 operations in a
# transaction.
FORGOTTEN, JOINED = 20, 15
# Operations in a transaction and the one inside of it together, as etcd counts them, at the most.
OPERATIONS = 120
# Others whose votes every vote compares with its own. With more of them, only the last voter
# compares.
COMPARED = 8


def key_of(kind: str, rank: int) -> str:
    """The key of a rank. All have the same length, so the keys of a replica are one range."""
    return f"{kind}{rank:010d}"


def rank_of(found: KeyValue) -> int:
    return int(found.key.rpartition("/")[2])


@dataclass(frozen=True)
class Vote:
    word: int
    acknowledged: frozenset[int]
    admit: frozenset[int] = frozenset()
    number: int = 1  # of the agreement: a vote of an earlier one that is put back does not count

    @classmethod
    def of_all(cls, votes: Sequence[Vote]) -> Vote:
        """The vote of several ranks: the AND of their words, and the sets that all of them have."""
        word = -1
        for vote in votes:
            word &= vote.word
        acknowledged, admit = ([getattr(vote, name) for vote in votes] for name in ("acknowledged", "admit"))
        both = frozenset.intersection(*acknowledged), frozenset.intersection(*admit)
        return cls(word, *both, number=votes[0].number)

    def to_bytes(self) -> bytes:
        runs = f"{_to_runs(self.acknowledged)}:{_to_runs(self.admit)}"
        return f"{self.number}:{self.word:x}:{runs}".encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Vote:
        number, word, acknowledged, admit = value.decode().split(":")
        return cls(int(word, 16), _from_runs(acknowledged), _from_runs(admit), int(number))


@dataclass(frozen=True)
class Decision:
    number: int
    word: int | None  # None: a participant was dead, and not all ranks had acknowledged that
    dead: frozenset[int]
    joined: frozenset[int]
    participants: frozenset[int]  # of the next agreement
    value: bytes = b""  # the bytes in etcd

    @classmethod
    def before_all(cls, size: int) -> Decision:
        return cls(0, None, frozenset(), frozenset(), frozenset(range(size)))

    @classmethod
    def of(cls, found: KeyValue) -> Decision:
        """Parse a decision, also one that was put back (see `in_place`)."""
        content = json.loads(found.value)
        return cls(
            content["number"],
            content["word"],
            frozenset(content["dead"]),
            frozenset(content["joined"]),
            _from_runs(content["participants"]),
            found.value,
        )

    @classmethod
    def in_place(cls, found: KeyValue) -> Decision | None:
        """Parse a decision; None for an earlier one that was put back: its key's version is not its
        number."""
        decision = cls.of(found)
        return decision if decision.number == found.version else None


@dataclass(frozen=True)
class VoteCount:
    """How many agreements were decided, how many votes there were, and the dead, at one revision of
    the store."""

    revision: int
    decided: int  # how many agreements
    dead: frozenset[int]
    cast: int  # how many votes

    @classmethod
    def of(cls, answer: Answer) -> VoteCount:
        decision, dead = answer.found[:2]
        decided = decision[0].version if decision else 0
        return cls(answer.revision, decided, frozenset(map(rank_of, dead)), answer.counts[2])


@dataclass(frozen=True)
class VoteSnapshot:
    """A count, and the votes themselves, at one revision of the store."""

    count: VoteCount
    votes: dict[int, Vote]
    asking: frozenset[int]

    @classmethod
    def of(cls, answer: Answer) -> VoteSnapshot:
        count = VoteCount.of(answer)
        votes = {rank_of(found): Vote.from_bytes(found.value) for found in answer.found[3]}
        current = {rank: vote for rank, vote in votes.items() if vote.number == count.decided + 1}
        return cls(count, current, frozenset(map(rank_of, answer.found[4])))


def decided(
    snapshot: VoteSnapshot, participants: frozenset[int], replica_size: int, by: int
) -> tuple[bytes, list[Operation]]:
    """The decision that follows from the votes of all living replicas, and the deletions that go
    with it."""
    declared = participants & snapshot.count.dead
    # A replica that has lost a rank is lost.
    dead = participants - intact(participants, declared, replica_size)
    votes = [vote for rank, vote in snapshot.votes.items() if rank in participants - dead]
    word, joined = None, frozenset[int]()
    if all(declared <= vote.acknowledged for vote in votes):
        counted = Vote.of_all(votes)
        word, admitted = counted.word, counted.admit & snapshot.asking - snapshot.count.dead
        joined = first_of(whole(admitted, replica_size), replica_size * JOINED)
        participants = participants - dead | joined
    content = _content(snapshot.count.decided + 1, word, dead, joined, participants, by)
    # Keys of replicas that have left, or lost a rank while they asked: such a replica can never be
    # whole again.
    gone = {rank // replica_size for rank in snapshot.count.dead - participants}
    cleaned = [
        delete_range(*(key_of(kind, rank * replica_size) for rank in (replica, replica + 1)))
        for replica in sorted(gone)[:FORGOTTEN]
        for kind in (DEAD, CLAIM, ASKING)
    ]
    cleaned += [
        delete_range(key_of(ASKING, rank), key_of(ASKING, rank + replica_size))
        for rank in sorted(joined)[::replica_size]
    ]
    return content, [*cleaned, *THROUGH]


def cast(rank: int, vote: Vote, participants: frozenset[int], replica_size: int) -> list[Operation]:
    """Write a vote; and the decision with it, if it is the last vote, all are equal, and no rank is
    dead or admitted.

    The caller guards that there is no such vote yet and that the agreement is open. Etcd itself
    compares the others' votes with the bytes that each of them would have signed: so no forged vote
    can take part.
    """
    write = [put(key_of(VOTE, rank), vote.to_bytes())]
    # The guards of the vote take up to two operations for each rank of the replica: its death, and
    # its host's lease.
    decision = unanimous(rank, vote, participants, replica_size, min(COMPARED, OPERATIONS - 2 * replica_size))
    return write if decision is None else [either(*decision, write)]


def unanimous(
    rank: int, vote: Vote, participants: frozenset[int], replica_size: int, most: int
) -> tuple[list[Operation], list[Operation]] | None:
    """Guards that all other votes equal this one, and the decision that follows.

    None where more than `most` others would have to be compared, or ranks are admitted.
    """
    others = sorted(leaders(participants, replica_size) - {rank})
    if vote.admit or len(others) > most:
        return None
    value = vote.to_bytes()
    last = [none_under(DEAD), *(value_is(key_of(VOTE, other), value) for other in others)]
    alike = _content(vote.number, vote.word, frozenset(), frozenset(), participants, rank)
    return last, [put(DECISION, alike), *THROUGH]


def check_kept(count: VoteCount, through: int) -> None:
    """Raise LostDataError if etcd has fewer agreements than this rank has been through."""
    if count.decided < through:
        raise LostDataError(
            f"etcd has lost its data: it knows of {count.decided} agreements, and this rank has been through "
            f"{through}; resume from the last checkpoint, with an etcd that keeps its data"
        )


def declare(client: EtcdClient, rank: int, why: str, *guards: Operation) -> None:
    """Declare `rank` dead, for all ranks and permanently.

    The caller has seen its process end, or must end it.

    Nothing is written if its keys were deleted already (it has no claim any more). Before the first
    agreement a rank may not have its claim yet, so it is written then in any case.
    """
    key = key_of(DEAD, rank)
    write = [put(key, why.encode())]
    early = either([version_is(DECISION, 0)], write)
    known = either([present(key_of(CLAIM, rank))], write, [early])
    while forged := client.txn([absent(key), *guards], [known], [get(key)]).forged:
        client.remove_forged(forged)  # a forged key would prevent the declaration of a real death


def intact(ranks: Iterable[int], dead: frozenset[int], replica_size: int) -> frozenset[int]:
    """The ranks whose replica has lost no rank."""
    lost = {rank // replica_size for rank in dead}
    return frozenset(rank for rank in ranks if rank // replica_size not in lost)


def leaders(ranks: Iterable[int], replica_size: int) -> frozenset[int]:
    """The ranks that vote for the replicas of these ranks: the lowest of each."""
    return frozenset(rank - rank % replica_size for rank in ranks)


def whole(ranks: Iterable[int], replica_size: int) -> frozenset[int]:
    """The ranks whose replica is complete."""
    there = frozenset(ranks)
    return frozenset(rank for rank in there if there.issuperset(replica_ranks(rank, replica_size)))


def replica_ranks(rank: int, replica_size: int) -> range:
    """All ranks of the replica of `rank`, itself included."""
    first = rank - rank % replica_size
    return range(first, first + replica_size)


def first_of(ranks: frozenset[int], most: int | None) -> frozenset[int]:
    """The lowest `most` ranks; None: all."""
    return ranks if most is None else frozenset(sorted(ranks)[: max(0, most)])


def _content(
    number: int,
    word: int | None,
    dead: Iterable[int],
    joined: Iterable[int],
    participants: Iterable[int],
    by: int,
) -> bytes:
    """The bytes of a decision. The participants are those of the next agreement."""
    told = {"number": number, "word": word, "dead": sorted(dead), "joined": sorted(joined)}
    return json.dumps(told | {"participants": _to_runs(participants), "by": by}).encode()


def _to_runs(ranks: Iterable[int]) -> str:
    """Ranks as `0-3,7`: short for consecutive ranks, however high their numbers are."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{first}-{last}" if first != last else str(first) for first, last in runs)


def _from_runs(runs: str) -> frozenset[int]:
    ranks: set[int] = set()
    for run in filter(None, runs.split(",")):
        first, _, last = run.partition("-")
        ranks.update(range(int(first), int(last or first) + 1))
    return frozenset(ranks)
