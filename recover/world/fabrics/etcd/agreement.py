"""What an agreement in etcd is made of: its keys, votes, what is decided from them, and one consistent look at all."""

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
# Once an agreement is decided, all the living have voted, so they are through with the messages before it.
THROUGH = (delete_all(VOTE), delete_all("mail/"), delete_all(TOLD))
# Every transaction about an agreement brings back a glance: how many have voted, not what.
GLANCE = (get(DECISION), get_all(DEAD), count(VOTE))
# One consistent look at all of it, for whoever is about to decide.
LOOK = (*GLANCE, get_all(VOTE), get_all(ASKING))
FORGOTTEN, JOINED = (
    20,
    15,
)  # replicas in one decision, at the most: etcd takes 128 operations in a transaction
OPERATIONS = 120  # that may be in a transaction and the one inside of it together, by etcd's count
COMPARED = 8  # others whose votes are compared by every vote: with more of them, by the one that finds that it is last


def key_of(kind: str, rank: int) -> str:
    """Of the same length for all ranks, so that those of a replica lie side by side."""
    return f"{kind}{rank:010d}"


def rank_of(found: KeyValue) -> int:
    return int(found.key.rpartition("/")[2])


@dataclass(frozen=True)
class Vote:
    word: int
    acknowledged: frozenset[int]
    admit: frozenset[int] = frozenset()
    number: int = 1  # of the agreement: a vote of an earlier one that somebody puts back does not count

    @classmethod
    def of_all(cls, votes: Sequence[Vote]) -> Vote:
        """What several say as one: no more than all of them do."""
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
    word: int | None  # None: a death was met that somebody had not acknowledged
    dead: frozenset[int]
    joined: frozenset[int]
    participants: frozenset[int]  # of the next agreement
    value: bytes = b""  # as it is in etcd

    @classmethod
    def before_all(cls, size: int) -> Decision:
        return cls(0, None, frozenset(), frozenset(), frozenset(range(size)))

    @classmethod
    def of(cls, found: KeyValue) -> Decision:
        """As its writer meant it. See `in_place`."""
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
        """None for an earlier decision that somebody has put back: its key has another version than it had."""
        decision = cls.of(found)
        return decision if decision.number == found.version else None


@dataclass(frozen=True)
class Glance:
    """What was there at one revision of the store."""

    revision: int
    decided: int  # how many agreements
    dead: frozenset[int]
    cast: int  # how many votes

    @classmethod
    def of(cls, answer: Answer) -> Glance:
        decision, dead = answer.found[:2]
        decided = decision[0].version if decision else 0
        return cls(answer.revision, decided, frozenset(map(rank_of, dead)), answer.counts[2])


@dataclass(frozen=True)
class Look:
    """A glance, and what the votes are."""

    glance: Glance
    votes: dict[int, Vote]
    asking: frozenset[int]

    @classmethod
    def of(cls, answer: Answer) -> Look:
        glance = Glance.of(answer)
        votes = {rank_of(found): Vote.from_bytes(found.value) for found in answer.found[3]}
        current = {rank: vote for rank, vote in votes.items() if vote.number == glance.decided + 1}
        return cls(glance, current, frozenset(map(rank_of, answer.found[4])))


def decided(
    look: Look, participants: frozenset[int], replica_size: int, by: int
) -> tuple[bytes, list[Operation]]:
    """What follows from the votes of all the living: the decision, and what nobody needs from then on."""
    declared = participants & look.glance.dead
    # A replica that has lost one of its ranks is lost.
    dead = participants - intact(participants, declared, replica_size)
    votes = [vote for rank, vote in look.votes.items() if rank in participants - dead]
    word, joined = None, frozenset[int]()
    if all(declared <= vote.acknowledged for vote in votes):
        counted = Vote.of_all(votes)
        word, admitted = counted.word, counted.admit & look.asking - look.glance.dead
        joined = first_of(whole(admitted, replica_size), replica_size * JOINED)
        participants = participants - dead | joined
    content = _content(look.glance.decided + 1, word, dead, joined, participants, by)
    # Of those who have left, and of those who died while they asked. A replica that lacks one can never be whole again.
    gone = {rank // replica_size for rank in look.glance.dead - participants}
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
    """A vote; and the decision at once, where it is the last one, all say the same, and nobody is dead or let in.

    For a writer whose vote was not there before, and whose agreement is not decided. That the others say the same is
    compared in etcd, with what each of them would have signed: so no forged vote can take part in it.
    """
    write = [put(key_of(VOTE, rank), vote.to_bytes())]
    # A vote is guarded by the lives of its replica's ranks, and by the leases of their hosts.
    decision = unanimous(rank, vote, participants, replica_size, min(COMPARED, OPERATIONS - 2 * replica_size))
    return write if decision is None else [either(*decision, write)]


def unanimous(
    rank: int, vote: Vote, participants: frozenset[int], replica_size: int, most: int
) -> tuple[list[Operation], list[Operation]] | None:
    """Guards that all others say what this one does, and the decision that follows. None where more than `most` others
    would have to be compared, or somebody is let in."""
    others = sorted(speakers(participants, replica_size) - {rank})
    if vote.admit or len(others) > most:
        return None
    value = vote.to_bytes()
    last = [none_under(DEAD), *(value_is(key_of(VOTE, other), value) for other in others)]
    alike = _content(vote.number, vote.word, frozenset(), frozenset(), participants, rank)
    return last, [put(DECISION, alike), *THROUGH]


def check_kept(glance: Glance, through: int) -> None:
    """Etcd must know of all agreements that a rank has been through. Raises LostDataError."""
    if glance.decided < through:
        raise LostDataError(
            f"etcd has lost its data: it knows of {glance.decided} agreements, and this rank has been through "
            f"{through}; go on from the last checkpoint, with an etcd that keeps them"
        )


def declare(client: EtcdClient, rank: int, why: str, *guards: Operation) -> None:
    """`rank` is dead, for all and for good. For whoever has seen its process end, or must end it.

    Not if it is forgotten already: those that have started the job have claimed their numbers before its first
    agreement, and the numbers of others have a claim from the start.
    """
    key = key_of(DEAD, rank)
    write = [put(key, why.encode())]
    early = either([version_is(DECISION, 0)], write)
    known = either([present(key_of(CLAIM, rank))], write, [early])
    while forged := client.txn([absent(key), *guards], [known], [get(key)]).forged:
        client.remove_forged(forged)  # it would keep a real death from being declared


def intact(ranks: Iterable[int], dead: frozenset[int], replica_size: int) -> frozenset[int]:
    """Those whose replica has lost nobody."""
    lost = {rank // replica_size for rank in dead}
    return frozenset(rank for rank in ranks if rank // replica_size not in lost)


def speakers(ranks: Iterable[int], replica_size: int) -> frozenset[int]:
    """Who votes for the replicas of these ranks: the lowest of each."""
    return frozenset(rank - rank % replica_size for rank in ranks)


def whole(ranks: Iterable[int], replica_size: int) -> frozenset[int]:
    """Those whose replica is there completely."""
    there = frozenset(ranks)
    return frozenset(rank for rank in there if there.issuperset(mates(rank, replica_size)))


def mates(rank: int, replica_size: int) -> range:
    """All ranks of its replica, itself included."""
    first = rank - rank % replica_size
    return range(first, first + replica_size)


def first_of(ranks: frozenset[int], most: int | None) -> frozenset[int]:
    """The lowest of them, so many at the most; None: all."""
    return ranks if most is None else frozenset(sorted(ranks)[: max(0, most)])


def _content(
    number: int,
    word: int | None,
    dead: Iterable[int],
    joined: Iterable[int],
    participants: Iterable[int],
    by: int,
) -> bytes:
    """A decision as it is in etcd. The participants are those of the next agreement."""
    told = {"number": number, "word": word, "dead": sorted(dead), "joined": sorted(joined)}
    return json.dumps(told | {"participants": _to_runs(participants), "by": by}).encode()


def _to_runs(ranks: Iterable[int]) -> str:
    """`0-3,7`: as short as what it says, however high the numbers are."""
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
