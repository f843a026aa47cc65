"""Who hangs while those on other hosts wait: agents tell each other how far their ranks are.

The ranks of a host see which of their neighbours hangs, if they wait for it. But a replica that fills a host waits
inside itself, where nobody looks, and a rank may be alone on its host. So each agent writes the rows of its board into
etcd, now and then, reads those of the others, and holds its own ranks against whoever is furthest. One that is stopped
while its agent runs was stopped alone, whoever waits for it; but where all replicas are, nobody does.

What it hears of the others, it leaves in its session for whoever looks on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from recover.job.grid import Grid
from recover.job.output import say
from recover.job.record_files import FILES
from recover.launch.verdict import marker_file
from recover.world.fabrics.etcd.client import EtcdClient
from recover.world.fabrics.etcd.progress import pulses, tell_pulse
from recover.world.liveness import other_hosts
from recover.world.liveness.board import ACCOMPLISHED, HEARTBEAT, Board, can_go_on, furthest, signs_of
from recover.world.liveness.signs import Sign
from recover.world.rank_exit import End
from recover.world.slot_notes import Notes, blamed
from recover.world.watchdog import HangWatchdog, describe

EVERY = 0.5  # seconds between two pulses
ASLEEP = 5.0  # seconds without a look after which the agent was stopped itself, or etcd silent


class Pulse:
    def __init__(
        self,
        client: EtcdClient,
        host: str,
        board: Board,
        mine: Sequence[int],
        grid: Grid,
        limit: float | None,
        notes: Notes,
        session: Path | None = None,
    ) -> None:
        self._client, self._host, self._board, self._mine = client, host, board, frozenset(mine)
        self.notes, self._session, self._grid = notes, session, grid
        self._hangs = HangWatchdog(grid, limit, partial(blamed, notes), asleep=ASLEEP)
        self._looks = 0
        self._looked = float("-inf")
        self._accomplished, self._at = 0, 0.0

    def look(self, now: float) -> dict[int, tuple[str, Sign]]:
        """Those of this host's ranks that hang, why, and what they show. Raises EtcdError."""
        if now - self._looked < EVERY:
            return {}
        self._looked, self._looks = now, self._looks + 1
        living = {rank: there for rank, there in self._board.living().items() if rank in self._mine}
        tell_pulse(self._client, self._host, other_hosts.told(living))
        heard = {
            rank: told
            for host, rows in pulses(self._client).items()
            if host != self._host
            for rank, told in rows.items()
        }
        if self._session is not None and heard:
            other_hosts.leave(self._session, heard)
        everywhere = dict(living)
        for rank, (row, state) in heard.items():
            row[HEARTBEAT] = self._looks  # that they live is for their own agents to say
            everywhere[rank] = row, state
        self._learn_pace(max((row[ACCOMPLISHED] for row, _ in everywhere.values()), default=0), now)
        signs = signs_of(everywhere, furthest(row for row, _ in everywhere.values()))
        hung = self._hangs.look(can_go_on(everywhere, self._grid), signs, now)
        return {rank: (why, signs[rank]) for rank, why in hung.items() if rank in living}

    def _learn_pace(self, accomplished: int, now: float) -> None:
        """How long a step takes, as seen from outside."""
        if accomplished > self._accomplished:
            if self._accomplished:
                self._hangs.committed((now - self._at) / (accomplished - self._accomplished))
            self._accomplished, self._at = accomplished, now


def fence(pulse: Pulse, board: Board, run_dir: Path) -> None:
    """Kill those of this host that hang. What they were computing is written down first, in etcd: the repair that
    follows must find it. Their markers are kept first, so that they are found when the ranks are gone, and go to the
    disk, which may take its time, when all wait for nobody any more."""
    for rank, (why, sign) in pulse.look(time.monotonic()).items():
        where = describe(sign.step, sign.suspects)
        if not sign.stopped and sign.suspects:  # no sample sends a signal
            pulse.notes.leave(sign.step, sign.suspects, why, rank)
        marker = {"end": str(End.FENCED), "detail": f"{why}{where}", "time": ""}
        FILES.keep(marker_file(run_dir, rank), json.dumps(marker).encode() + b"\n")
        board.kill(rank)
        say(f"killed rank {rank}{where}: {why}")
        FILES.flush()
