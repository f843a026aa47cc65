"""The fabric of a world of one: agreements need no other rank, and no other rank can die.

Needs no MPI.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from recover.world.fabrics.base import Admission, FabricError, NotAdmittedError
from recover.world.liveness.board import Board


class LoneFabric:
    rank, size = 0, 1

    def __init__(self, board: Board) -> None:
        self.lock = threading.RLock()
        self.waiting_in: int | None = None
        self._board, self._agreements = board, 0

    @property
    def agreements(self) -> int:
        return self._agreements

    @property
    def participants(self) -> frozenset[int]:
        return frozenset(range(self.size))  # no rank can join

    def asking(self) -> frozenset[int]:
        return frozenset()

    def ask(self) -> Admission:
        raise NotAdmittedError("nobody can join a world of one")

    def agree(self, word: int, admit: frozenset[int] = frozenset()) -> int | None:
        self._agreements += 1
        self._board.enter(self.rank, self._agreements)
        self._board.finish(self.rank, self._agreements)
        return word

    def failed(self) -> frozenset[int]:
        return frozenset()

    def heartbeats(self) -> Mapping[int, int]:
        return {}

    def look_for_exits(self, now: float) -> None:
        """There are no other ranks."""

    def acknowledge(self, only: frozenset[int] | None = None) -> frozenset[int]:
        return frozenset()

    def send(self, data: bytes, to: int, tag: int) -> NoReturn:
        raise FabricError(f"there is no rank {to} in a world of one")

    def receive(self, source: int, tag: int) -> NoReturn:
        raise FabricError(f"there is no rank {source} in a world of one")

    def send_to_all(self, data: bytes, to: Sequence[int], tag: int) -> tuple[()]:
        return ()

    def receive_as_all(self, source: int, tag: int) -> NoReturn:
        self.receive(source, tag)

    def linger(self, seconds: float) -> None:
        """There are no other ranks."""

    def fence(self, rank: int) -> None:
        """There are no other ranks."""

    def now(self) -> float:
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)
