"""Slots: the numbers of the microbatches of one step, kept as sorted, disjoint, half-open ranges.

A step of B microbatches has the slots 0..B-1. Replicas hold and are dealt whole runs of them, so
a set is a handful of ranges however large B is. Sets never change; every operation returns a new
one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_PAIR = struct.Struct("<II")


@dataclass(frozen=True)
class SlotSet:
    """A set of slot numbers. `SlotSet([(0, 8), (12, 14)])` holds 0 to 7, 12 and 13.

    `ranges` is in normal form (sorted, no empty range, none touching the next), so equal sets
    compare and hash as equal; it is plain tuples of integers, which JSON and bytes carry as they
    are.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        object.__setattr__(self, "ranges", _normal(ranges))

    @classmethod
    def span(cls, start: int, stop: int) -> SlotSet:
        """The slots start, start+1, ..., stop-1."""
        return cls([(start, stop)])

    @classmethod
    def union(cls, sets: Iterable[SlotSet]) -> SlotSet:
        return cls([pair for each in sets for pair in each.ranges])

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.ranges:
            yield from range(start, stop)

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and any(start <= slot < stop for start, stop in self.ranges)

    def __or__(self, other: SlotSet) -> SlotSet:
        return SlotSet(self.ranges + other.ranges)

    def __sub__(self, other: SlotSet) -> SlotSet:
        mine, theirs = self.ranges, other.ranges
        if not (mine and theirs and theirs[0][0] < mine[-1][1] and mine[0][0] < theirs[-1][1]):
            return self
        left: list[tuple[int, int]] = []
        holes = iter(other.ranges)
        hole = next(holes, None)
        for start, stop in self.ranges:
            while hole is not None and hole[1] <= start:
                hole = next(holes, None)
            # A hole may reach into the next range too, so it is only passed once it ends inside
            # this one.
            while hole is not None and hole[0] < stop:
                left.append((start, hole[0]))
                start = hole[1]
                if start >= stop:
                    break
                hole = next(holes, None)
            left.append((start, max(start, stop)))
        return SlotSet((start, stop) for start, stop in left if start < stop)

    def __and__(self, other: SlotSet) -> SlotSet:
        return self - (self - other)

    def take(self, count: int) -> tuple[SlotSet, SlotSet]:
        """The `count` lowest slots, and the others."""
        if not 0 <= count <= len(self):
            raise ValueError(f"cannot take {count} slots from {len(self)} ({self}): ask for 0 to {len(self)}")
        first: list[tuple[int, int]] = []
        for place, (start, stop) in enumerate(self.ranges):
            if count < stop - start:
                first.append((start, start + count))
                return SlotSet(first), SlotSet([(start + count, stop), *self.ranges[place + 1 :]])
            first.append((start, stop))
            count -= stop - start
        return self, SlotSet()

    def deal(self, counts: Iterable[int]) -> list[SlotSet]:
        """The lowest slots to the first taker, the next ones to the second, and so on."""
        hands: list[SlotSet] = []
        rest = self
        for count in counts:
            hand, rest = rest.take(count)
            hands.append(hand)
        return hands

    def to_bytes(self) -> bytes:
        return b"".join(_PAIR.pack(start, stop) for start, stop in self.ranges)

    @classmethod
    def from_bytes(cls, data: bytes) -> SlotSet:
        if len(data) % _PAIR.size:
            raise ValueError(f"{len(data)} bytes are no slot set: {_PAIR.size} bytes per range were expected")
        return cls(_PAIR.iter_unpack(data))

    def __str__(self) -> str:
        """`0-7,12` (last slot included), or `none`."""
        parts = (str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in self.ranges)
        return ",".join(parts) or "none"


def even(total: int, parts: int) -> list[int]:
    """Split `total` into `parts` whole numbers that differ by one at most, the larger ones first."""
    floor, larger = divmod(total, parts)
    return [floor + 1] * larger + [floor] * (parts - larger)


def _normal(ranges: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((start, stop) for start, stop in ranges):
        if start < 0 or stop < start:
            raise ValueError(f"({start}, {stop}) is no range of slots: 0 <= start <= stop is needed")
        if start == stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)
