"""What an agreement in etcd is made of: its keys, votes, the decision, and one consistent look at all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recover.fabrics.etcd_client import Answer, EtcdClient, KeyValue, Operation, absent, get, get_all, put

DECISION, DEAD = "seen/decision", "seen/dead/"
# One consistent look at all that an agreement is made of. Every transaction about one brings it back.
LOOK = (get(DECISION), get_all("vote/"), get_all(DEAD))


@dataclass(frozen=True)
class Vote:
    number: int
    word: int
    acknowledged: frozenset[int]

    def to_bytes(self) -> bytes:
        return f"{self.number}:{self.word:x}:{_to_bits(self.acknowledged):x}".encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Vote:
        number, word, bits = value.decode().split(":")
        return cls(int(number), int(word, 16), _from_bits(int(bits, 16)))


@dataclass(frozen=True)
class Decision:
    number: int
    word: int | None  # None: a death was met that somebody had not acknowledged
    dead: frozenset[int]
    value: bytes = b""  # as it is in etcd

    @classmethod
    def of(cls, found: Sequence[KeyValue]) -> Decision:
        if not found:
            return cls(0, None, frozenset())
        content = json.loads(found[0].value)
        return cls(found[0].version, content["word"], frozenset(content["dead"]), found[0].value)


@dataclass(frozen=True)
class Look:
    """What was there at one revision of the store."""

    revision: int
    decided: int  # how many agreements
    votes: dict[int, Vote]
    dead: frozenset[int]

    @classmethod
    def of(cls, answer: Answer) -> Look:
        decision, votes, dead = answer.found
        return cls(
            answer.revision,
            Decision.of(decision).number,
            {rank_of(found): Vote.from_bytes(found.value) for found in votes},
            frozenset(map(rank_of, dead)),
        )

    def misses(self, rank: int, number: int) -> bool:
        """Whether `rank` lives, and has not voted in this agreement."""
        return rank not in self.dead and (rank not in self.votes or self.votes[rank].number != number)


def declare(client: EtcdClient, rank: int, why: str, *guards: Operation) -> None:
    """`rank` is dead, for all and for good. For whoever has seen its process end, or must end it."""
    key = f"{DEAD}{rank}"
    client.txn([absent(key), *guards], [put(key, why.encode())])


def rank_of(found: KeyValue) -> int:
    return int(found.key.rpartition("/")[2])


def _to_bits(ranks: Iterable[int]) -> int:
    return sum(1 << rank for rank in ranks)


def _from_bits(bits: int) -> frozenset[int]:
    return frozenset(rank for rank in range(bits.bit_length()) if bits >> rank & 1)
