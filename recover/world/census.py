"""The census of a repair: one row from every member, as a table that all members read."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

# First words of the reason for which a replica was excluded because of broken links.
BROKEN_LINK = "its link is broken to"

# First bytes of the record of a joining rank that does not hold the state yet.
ARRIVAL = b"\xff" * 8

_HEAD = struct.Struct("<q?qqqqq")


@dataclass(frozen=True)
class Row:
    """The row of a member in the census."""

    offer: bytes
    record: bytes
    can_build: bool = True
    own: int = 0  # rounds over these members in which it could not make a carrier
    built: int = 0  # rounds in which its carrier was made, and could not be built
    waited: int = 0  # rounds in which it waited in vain for others
    trouble: str = ""  # its last error
    epoch: int = 0  # before this repair; 0 of a joining rank
    before: tuple[int, ...] = ()  # the members of that epoch, from one of them: a joining rank cannot know
    unreached: tuple[int, ...] = ()  # members that did not answer when its carrier was built last
    leaving: tuple[int, ...] = ()  # ranks that leave on notice, as far as it knows
    call: int = 0  # its collective call (`recover.world.calls`); 0: none

    def to_bytes(self, rank: int) -> bytes:
        head = _HEAD.pack(rank, self.can_build, self.own, self.built, self.waited, self.epoch, self.call)
        numbers = map(_to_bytes, (self.before, self.unreached, self.leaving))
        return pack([head, *numbers, self.offer, self.record, self.trouble.encode()])

    @classmethod
    def from_bytes(cls, packed: bytes) -> tuple[int, Row]:
        head, before, unreached, leaving, offer, record, trouble = unpack(packed)
        rank, can_build, own, built, waited, epoch, call = _HEAD.unpack(head)
        return rank, cls(
            offer=offer,
            record=record,
            can_build=can_build,
            own=own,
            built=built,
            waited=waited,
            trouble=trouble.decode(),
            epoch=epoch,
            before=_from_bytes(before),
            unreached=_from_bytes(unreached),
            leaving=_from_bytes(leaving),
            call=call,
        )


@dataclass(frozen=True)
class Census:
    """The result of a repair, the same on all members except for `seconds`."""

    epoch: int
    members: tuple[int, ...]
    lost: tuple[int, ...]  # members of the epoch before that are not in this one, without those that left
    records: Mapping[int, bytes]  # one opaque record from every member
    rounds: int
    seconds: float
    joined: tuple[int, ...] = ()  # members that were not in the epoch before
    left: tuple[int, ...] = ()  # members of the epoch before that left on notice
    calls: Mapping[int, int] = field(default_factory=dict)  # the collective calls that members are in
    # Replicas that this repair has excluded because of broken links, and why. A rank that joined in
    # this repair does not know of them.
    unreached: Mapping[int, str] = field(default_factory=dict)


def _to_bytes(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _from_bytes(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 8}q", packed)


def broken_links(rows: Mapping[int, Row]) -> frozenset[tuple[int, int]]:
    """The pairs of members of which either could not reach the other; the lower number first."""
    return frozenset(
        (min(rank, other), max(rank, other))
        for rank, row in rows.items()
        for other in row.unreached
        if other in rows
    )


def is_arrival(record: bytes) -> bool:
    """Whether this is the record of a joining rank, which does not hold the state yet."""
    return record.startswith(ARRIVAL)


def left_behind(records: Mapping[int, bytes], began: int) -> frozenset[int]:
    """The ranks to exclude where some scripts have ended (they send empty records) and others are
    in a step.

    The ended ranks are excluded, with one exception: if only joined ranks (from number `began` on)
    are in a step, these are excluded, because they count their steps by themselves, and the
    original ranks have done all the work.
    """
    ended = frozenset(rank for rank, record in records.items() if not record)
    inside = frozenset(rank for rank, record in records.items() if record and not is_arrival(record))
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
