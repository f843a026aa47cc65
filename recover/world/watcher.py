"""The watcher: a thread that learns of deaths while the main thread computes or waits for data.

- If another rank of this replica is dead, it ends this rank at once, whatever the main thread is blocked in: the
  world's agreement would otherwise wait for it for ever.
- If any other member is dead, it frees this rank's cross-replica group, so that no thread stays blocked there.
- If this rank was declared dead, or an agreement has forgotten it, it ends this rank.
- If another rank of this host hangs while this one waits, it kills that rank.
- If the link between members of the group is broken, it frees the group (`recover.world.links`).

While the main thread is inside the protocol itself (an agreement, a repair) it holds the fabric's
lock, and the watcher keeps out of the fabric: a rank that has voted ends only as the repair
decides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NoReturn

from recover.job.grid import Grid
from recover.world.deaths import KnownDeaths
from recover.world.fabrics.base import DeclaredDeadError
from recover.world.interfaces import Own, WorldParts
from recover.world.liveness.signs import Sign
from recover.world.rank_exit import End
from recover.world.watchdog import AgreementWatchdog, HangWatchdog, describe

INTERVAL = 0.005  # seconds; most of the watcher's cost is waking up
LOOK = 0.05  # seconds between two reads of the other ranks' signs of life


class Watcher:
    """One per rank. `on_death` gets the set of all known deaths each time it has grown.

    `waits`: whether this rank waits for others; only then may it find that one of them hangs.
    `look_at_links` and `look_at_calls` (others may be in another collective call) are called with
    every read of the signs of life.
    """

    def __init__(
        self,
        parts: WorldParts,
        grid: Grid,
        hangs: HangWatchdog,
        deaths: KnownDeaths,
        on_death: Callable[[frozenset[int]], None],
        waits: Callable[[], bool],
        look_at_links: Callable[[float], None],
        look_at_calls: Callable[[float], object],
    ) -> None:
        self._fabric, self._board, self._own, self._notes = (
            parts.fabric,
            parts.liveness,
            parts.own,
            parts.notes,
        )
        self._deaths, self._on_death, self._waits = deaths, on_death, waits
        self._look_at_links, self._look_at_calls = look_at_links, look_at_calls
        self._peers = grid.replica_peers(self._fabric.rank)
        self._agreements, self._hangs = AgreementWatchdog(), hangs
        self._known: frozenset[int] = frozenset()
        self._fenced: set[int] = set()
        self._looked = 0.0
        self._ignores_deaths = False

    def ignore_deaths(self) -> None:
        """Ignore deaths from now on: all have agreed to end."""
        self._ignores_deaths = True

    def start(self) -> None:
        """Run on a thread of its own until the process ends."""
        threading.Thread(target=self._loop, name="recover-watcher", daemon=True).start()

    def _loop(self) -> None:
        while True:
            self._board.beat(self._fabric.rank)
            time.sleep(INTERVAL)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Run one pass."""
        if now - self._looked > LOOK:
            self._looked = now
            self._look_at_links(now)
            self._look_for_hung_ranks(now)
            self._look_at_calls(now)
        self._look_for_a_forgotten_agreement(now)
        if not self._ignores_deaths:
            self._fabric.look_for_exits(now)
        if self._fabric.lock.acquire(blocking=False):
            try:
                self._look_for_deaths()
            except DeclaredDeadError as error:
                # The main thread computes, or is in the script: it would not learn of its death
                # before its next agreement.
                end_declared_dead(self._own, error)
            finally:
                self._fabric.lock.release()

    def _look_for_deaths(self) -> None:
        if self._ignores_deaths:
            return
        failed = self._deaths.look()
        if failed == self._known:
            return
        self._known = failed
        if lost := self._peers & failed:
            self._own.die(End.ORPHAN, f"rank {min(lost)} of this replica has died, so the replica is lost")
        self._on_death(failed)

    def _look_for_a_forgotten_agreement(self, now: float) -> None:
        agreement = self._fabric.waiting_in
        held = agreement is not None and self._board.held_by_others(agreement)
        if held and self._hangs.hushed:
            held = False  # a rank may have stopped halfway through sending the result; it is fenced, or continues
        if self._agreements.forgotten(agreement, held, now):
            self._own.die(
                End.FENCED,
                f"agreement {agreement} was decided without this rank; it leaves so that the others go on",
            )

    def _look_for_hung_ranks(self, now: float) -> None:
        waits = self._waits()
        signs = self._board.signs_of_life(self._fabric.rank) if waits else {}
        # No rank waits for a rank that was not admitted yet.
        signs = {rank: sign for rank, sign in signs.items() if rank in self._fabric.participants}
        for rank, why in self._hangs.look(waits, signs, now).items():
            if not self._board.pid(rank):
                continue  # it is dead already, and all will notice
            if rank not in self._fenced:
                self._fenced.add(rank)
                self._write_down(rank, why, signs[rank])
            # In every pass: a process that is stuck in the kernel dies when it returns from it.
            self._board.kill(rank)

    def _write_down(self, rank: int, why: str, sign: Sign) -> None:
        """Write the note before the rank dies: the repair that follows must find what it was
        computing."""
        where = describe(sign.step, sign.suspects) if sign.step else ""
        self._own.log(f"fenced rank {rank}{where}: {why}")
        try:
            if not sign.stopped and sign.suspects:  # a sample cannot stop a process
                self._notes.leave(sign.step, sign.suspects, why, rank)
            self._own.record(End.FENCED, f"{why}{where}, so rank {self._fabric.rank} killed it", rank)
        except Exception as error:  # of any kind: all wait for the rank that hangs
            self._own.log(f"rank {rank} is killed without a note: {type(error).__name__}: {error}")


def end_declared_dead(own: Own, error: DeclaredDeadError) -> NoReturn:
    own.die(End.ORPHAN if error.orphan else End.FENCED, str(error))
