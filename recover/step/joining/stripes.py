"""Transfer of the state to joining replicas in stripes: each rank that holds the state sends one
stripe, at the same time.

The state of a rank is a list of parts, each a flat row of bytes. Their concatenation is cut into
one stripe for each giver. A stripe is sent in pieces through two buffers in turns: one is filled
or emptied while the other is on the wire. Rows and buffers are NumPy arrays or tensors: this
module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from recover.world.carriers.worker import Work
from recover.world.cross_group import CrossGroup

WORD = 8  # bytes; whole words are sent
PIECE, SMALL_PIECE = 1 << 20, 1 << 17  # words: largest and smallest piece
TURNS = 8  # pieces of a stripe, at least: one is filled while another one is on the wire
Span = tuple[int, int]  # first word, and the word behind the last


class Stripes:
    """One transfer over a cross group. `givers`, `takers`: ranks of this group.

    buffer:     creates a buffer of a number of int64 words
    as_bytes:   views the memory of a buffer as bytes
    under_way:  called with the work of each piece
    """

    def __init__(
        self,
        cross: CrossGroup,
        givers: Sequence[int],
        takers: Sequence[int],
        buffer: Callable[[int], Any] = lambda words: np.zeros(words, np.int64),
        as_bytes: Callable[[Any], Any] = lambda words: words.view(np.uint8),
        under_way: Callable[[Work], object] = lambda work: None,
    ) -> None:
        self._cross, self._buffer, self._as_bytes, self._under_way = cross, buffer, as_bytes, under_way
        self._givers = [cross.peers.index(rank) for rank in givers if rank in cross.peers]
        self._takers = [cross.peers.index(rank) for rank in takers if rank in cross.peers]

    def send_head(self, head: bytes) -> bool:
        """The first giver sends the head, which describes the parts, to all takers."""
        if self._cross.index != self._givers[0]:
            return True
        words = np.zeros(-(-len(head) // WORD), np.int64)
        words.view(np.uint8)[: len(head)] = np.frombuffer(head, np.uint8)
        for data in (np.array([len(head)], np.int64), words):
            if not self._cross.exchange(dict.fromkeys(self._takers, data), {}).wait():
                return False
        return True

    def receive_head(self) -> bytes | None:
        length, source = np.zeros(1, np.int64), self._givers[0]
        if not self._cross.exchange({}, {source: length}).wait():
            return None
        words = np.zeros(-(-int(length[0]) // WORD), np.int64)
        if not self._cross.exchange({}, {source: words}).wait():
            return None
        return bytes(words.view(np.uint8)[: int(length[0])])

    def give(self, parts: Sequence[Any], wait: bool = True) -> bool:
        """Send this rank's stripe to all takers. Returns whether that succeeded here; without `wait`,
        whether nothing has failed so far: the last pieces are under way, with buffers of their own."""
        mine = self._pieces(parts, self._givers.index(self._cross.index))
        buffers: list[Any] = [None, None]
        works: list[Work | None] = [None, None]
        for turn, (start, stop) in enumerate(mine):
            before = works[turn % 2]
            # The buffer is filled again only after the piece in it has been sent.
            if before is not None and not before.wait():
                return False
            if buffers[turn % 2] is None:
                buffers[turn % 2] = self._buffer(stop - start)
            room = buffers[turn % 2][: stop - start]
            for here, there in _overlaps(parts, start, stop):
                self._as_bytes(room)[there] = parts[here[0]][here[1]]
            works[turn % 2] = work = self._cross.exchange(dict.fromkeys(self._takers, room), {})
            self._under_way(work)
        if not wait:
            return True
        # Wait for all of them, also after a failure: afterwards no buffer is in use.
        ended = [work.wait() for work in works if work is not None]
        return all(ended)

    def take(self, parts: Sequence[Any]) -> bool:
        """Receive all stripes into these parts. Returns whether they are complete."""
        pieces = {giver: self._pieces(parts, n) for n, giver in enumerate(self._givers)}
        turns = max(map(len, pieces.values()))
        buffers: list[dict[int, Any]] = [{}, {}]
        works: list[Work | None] = [None, None]
        complete = True
        for turn in range(turns + 1):
            if turn < turns:
                now = {giver: spans[turn] for giver, spans in pieces.items() if turn < len(spans)}
                rooms = buffers[turn % 2]
                for giver in now.keys() - rooms.keys():
                    rooms[giver] = self._buffer(now[giver][1] - now[giver][0])
                into = {giver: rooms[giver][: stop - start] for giver, (start, stop) in now.items()}
                works[turn % 2] = work = self._cross.exchange({}, into)
                self._under_way(work)
            last = works[(turn - 1) % 2]
            if turn and last is not None:
                complete &= last.wait()
                for giver, spans in pieces.items() if complete else ():
                    if turn - 1 < len(spans):
                        start, stop = spans[turn - 1]
                        room = buffers[(turn - 1) % 2][giver][: stop - start]
                        for here, there in _overlaps(parts, start, stop):
                            parts[here[0]][here[1]] = self._as_bytes(room)[there]
        return complete

    def _pieces(self, parts: Sequence[Any], giver: int) -> list[Span]:
        words = -(-sum(map(len, parts)) // WORD)
        first, last = (words * n // len(self._givers) for n in (giver, giver + 1))
        piece = min(PIECE, max(SMALL_PIECE, -(-(last - first) // TURNS)))
        return [(start, min(start + piece, last)) for start in range(first, last, piece)]


def _overlaps(parts: Sequence[Any], start: int, stop: int) -> Iterator[tuple[tuple[int, slice], slice]]:
    """Maps the words from `start` to `stop`: number of the part and slice of its bytes, slice of
    the bytes of the words."""
    first, last, at = start * WORD, stop * WORD, 0
    for number, part in enumerate(parts):
        low, high = max(first, at), min(last, at + len(part))
        if low < high:
            yield (number, slice(low - at, high - at)), slice(low - first, high - first)
        at += len(part)
