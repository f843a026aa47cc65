"""The liveness board of one host whose ranks are not processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from recover.world.liveness.board import CALL, COLUMNS, PID, POSITION, Board


class SimulatedBoard(Board):
    """Rows are real; which ranks live or are stopped, and how a rank is killed, is given by the simulation."""

    def __init__(
        self,
        size: int,
        alive: Callable[[int], bool],
        stopped: Callable[[int], bool],
        kill: Callable[[int], None],
    ) -> None:
        self.size = size
        self._table = np.zeros((size, COLUMNS), np.int64)
        self._table[:, PID] = 1 + np.arange(size)
        self._alive, self._stopped, self._kill = alive, stopped, kill

    def pid(self, rank: int) -> int:
        return int(self._table[rank, PID]) if self._alive(rank) else 0

    def _state(self, row: Sequence[int]) -> str:
        rank = row[PID] - 1
        if not self._alive(rank):
            return ""
        return "T" if self._stopped(rank) else "S"

    def calls(self) -> set[tuple[int, int]]:
        """The collective calls of living ranks, each with its position in the order of calls."""
        announced = enumerate(self._table[:, [POSITION, CALL]].tolist())
        return {(position, call) for rank, (position, call) in announced if call and self._alive(rank)}

    def kill(self, rank: int) -> None:
        self._kill(rank)
