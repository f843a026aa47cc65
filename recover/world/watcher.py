"""The watcher: a thread that learns of deaths while the main thread computes or waits for data.

It does three things. If a mate of this rank's replica is dead, the rank leaves at once, whatever it is blocked in:
the world's agreement would otherwise wait for it for ever. If anybody else is dead, it frees this rank's
cross-replica group, so that nobody stays blocked there. And if an agreement has forgotten this rank, the rank gives
itself up. While the main thread is inside the protocol itself (an agreement, a repair) it keeps out of MPI: a rank that
has voted leaves only as the repair tells it to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from recover.world import ending
from recover.world.board import Board
from recover.world.grid import Grid
from recover.world.openmpi import OpenMPIFabric
from recover.world.watchdog import AgreementWatchdog

INTERVAL = 0.003


class Watcher:
    """Started once per process. `on_death` gets the set of all known deaths, each time that it has grown."""

    def __init__(
        self, fabric: OpenMPIFabric, grid: Grid, board: Board, on_death: Callable[[frozenset[int]], None]
    ) -> None:
        self._fabric, self._board, self._on_death = fabric, board, on_death
        self._mates = grid.mates(fabric.rank)
        self._watchdog = AgreementWatchdog()
        self._known: frozenset[int] = frozenset()
        threading.Thread(target=self._loop, name="recover-watcher", daemon=True).start()

    def _loop(self) -> None:
        while True:
            time.sleep(INTERVAL)
            self._look_at_the_board()
            if self._fabric.lock.acquire(blocking=False):
                try:
                    self._look_for_deaths()
                finally:
                    self._fabric.lock.release()

    def _look_for_deaths(self) -> None:
        failed = self._fabric.failed()
        if failed == self._known:
            return
        self._known = failed
        if lost := self._mates & failed:
            ending.die(
                ending.End.ORPHAN, f"rank {min(lost)} of this replica has died, so the replica is lost"
            )
        self._on_death(failed)

    def _look_at_the_board(self) -> None:
        agreement = self._fabric.waiting_in
        held = agreement is not None and self._board.held_by_others(agreement)
        if self._watchdog.forgotten(agreement, held, time.monotonic()):
            ending.die(
                ending.End.FENCED,
                f"agreement {agreement} was decided without this rank; it leaves so that the others go on",
            )
