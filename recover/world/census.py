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
    unreached: tuple[int, ...] = ()  # the members that did not answer it when its carrier was built last
    call: int = 0  # the collective call that it is in (`recover.world.calls`); 0: in none

    def to_bytes(self, rank: int) -> bytes:
        head = _HEAD.pack(rank, self.can_build, self.own, self.built, self.waited, self.epoch, self.call)
        numbers = _to_bytes(self.before), _to_bytes(self.unreached)
        return pack([head, *numbers, self.offer, self.record, self.trouble.encode()])

    @classmethod
    def from_bytes(cls, packed: bytes) -> tuple[int, Row]:
        head, before, unreached, offer, record, trouble = unpack(packed)
        rank, can_build, own, built, waited, epoch, call = _HEAD.unpack(head)
        numbers = _from_bytes(before), _from_bytes(unreached)
        return rank, cls(
            offer, record, can_build, own, built, waited, trouble.decode(), epoch, *numbers, call
        )


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


def _to_bytes(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _from_bytes(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 8}q", packed)


def broken_links(rows: Mapping[int, Row]) -> frozenset[tuple[int, int]]:
    """The pairs of members of which one does not reach the other, whichever of them says so; the lower number first."""
    return frozenset(
        (min(rank, other), max(rank, other))
        for rank, row in rows.items()
        for other in row.unreached
        if other in rows
    )


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
