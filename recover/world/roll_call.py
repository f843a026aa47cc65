"""The census of a repair: what every member says of itself, as one table that all of them read."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_HEAD = struct.Struct("<q?qqqqq")


@dataclass(frozen=True)
class Row:
    """What a member says of itself in the census."""

    offer: bytes
    record: bytes
    can_build: bool = True
    own: int = 0  # how often it could not even make a carrier, over these members
    built: int = 0  # how often its carrier was made, and failed when it was built
    waited: int = 0  # how often it waited in vain for others to build theirs
    trouble: str = ""  # what it failed by last
    epoch: int = 0  # before this repair; 0 of one that joins
    before: tuple[int, ...] = ()  # the members of that epoch, told by one of them: who joins cannot know
    call: int = 0  # the collective call that it is in (`recover.world.calls`); 0: in none

    def to_bytes(self, rank: int) -> bytes:
        head = _HEAD.pack(rank, self.can_build, self.own, self.built, self.waited, self.epoch, self.call)
        before = struct.pack(f"<{len(self.before)}q", *self.before)
        return pack([head, before, self.offer, self.record, self.trouble.encode()])

    @classmethod
    def from_bytes(cls, packed: bytes) -> tuple[int, Row]:
        head, before, offer, record, trouble = unpack(packed)
        rank, can_build, own, built, waited, epoch, call = _HEAD.unpack(head)
        members = struct.unpack(f"<{len(before) // 8}q", before)
        return rank, cls(offer, record, can_build, own, built, waited, trouble.decode(), epoch, members, call)


@dataclass(frozen=True)
class Census:
    """What a repair found out, the same on all members but for the time it took."""

    epoch: int
    members: tuple[int, ...]
    lost: tuple[int, ...]  # the members of the epoch before that are no more
    records: Mapping[int, bytes]  # one opaque record from every member
    rounds: int
    seconds: float
    joined: tuple[int, ...] = ()  # the members that were none in the epoch before
    calls: Mapping[int, int] = field(default_factory=dict)  # the collective calls that members are in


def left_behind(records: Mapping[int, bytes], began: int) -> frozenset[int]:
    """Whom the others go on without where some scripts have ended (they send empty records) and some are in a step.

    Those who have ended. But where only ranks are inside that came later (from number `began` on), those: they have
    counted their steps by themselves, and all that was to be done is done.
    """
    ended = frozenset(rank for rank, record in records.items() if not record)
    inside = frozenset(records) - ended
    if not ended or not inside:
        return frozenset()
    return inside if min(inside) >= began > min(ended) else ended


def pack(parts: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<q", len(part)) + part for part in parts)


def unpack(packed: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(packed):
        (length,) = struct.unpack_from("<q", packed, at)
        at += 8 + length
        yield packed[at - length : at]
