"""Detection of ranks that hang while ranks on other hosts wait: agents exchange how far their ranks
are.

The ranks of a host detect a neighbour that hangs, if they wait for it. But a replica that fills a
host waits inside itself, and a rank may be alone on its host. So each agent writes the rows of its
board to etcd twice a second, reads those of the others, and compares its own ranks with the rank
that is furthest. A rank that is stopped while its agent runs was stopped alone; it is killed only
while another replica can go on, or if its own replica has lost another rank.

The rows of other hosts are also written to the session, for monitors.
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
from recover.world.fabrics.etcd.progress import pulses, write_pulse
from recover.world.liveness import other_hosts
from recover.world.liveness.board import ACCOMPLISHED, HEARTBEAT, Board, furthest, may_be_ended, signs_of
from recover.world.liveness.signs import Sign
from recover.world.rank_exit import End
from recover.world.slot_notes import Notes, blamed
from recover.world.watchdog import HangWatchdog, describe

EVERY = 0.5  # seconds between two exchanges
ASLEEP = 5.0  # seconds between two exchanges after which the agent was stopped itself, or etcd silent


class HangDetector:
    """Detects ranks of one host that hang. `mine`: rows of the board that are exchanged. `limit`:
    seconds, or None for the default."""

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
        """Ranks of this host that hang, each with the reason and its sign of life. Raises
        EtcdError."""
        if now - self._looked < EVERY:
            return {}
        self._looked, self._looks = now, self._looks + 1
        living = {rank: there for rank, there in self._board.living().items() if rank in self._mine}
        write_pulse(self._client, self._host, other_hosts.told(living))
        heard = {
            rank: shown
            for host, rows in pulses(self._client).items()
            if host != self._host
            for rank, shown in rows.items()
        }
        if self._session is not None and heard:
            other_hosts.leave(self._session, heard)
        everywhere = dict(living)
        for rank, (row, state) in heard.items():
            row[HEARTBEAT] = self._looks  # whether these ranks live is decided by their own agents
            everywhere[rank] = row, state
        self._learn_pace(max((row[ACCOMPLISHED] for row, _ in everywhere.values()), default=0), now)
        killable = may_be_ended(everywhere, self._grid)
        signs = signs_of(everywhere, furthest(row for row, _ in everywhere.values()))
        signs = {rank: sign for rank, sign in signs.items() if rank in killable}
        hung = self._hangs.look(bool(signs), signs, now)
        return {rank: (why, signs[rank]) for rank, why in hung.items() if rank in living}

    def _learn_pace(self, accomplished: int, now: float) -> None:
        """Learn how long a step takes, from the number of committed steps."""
        if accomplished > self._accomplished:
            if self._accomplished:
                self._hangs.committed((now - self._at) / (accomplished - self._accomplished))
            self._accomplished, self._at = accomplished, now


def fence(detector: HangDetector, board: Board, run_dir: Path) -> None:
    """Kill the ranks of this host that hang."""
    for rank, (why, sign) in detector.look(time.monotonic()).items():
        where = describe(sign.step, sign.suspects)
        # Order: the note of what the rank computes goes to etcd before the kill, for the repair
        # that follows reads it. The marker is kept in memory before the kill, so that it is there
        # when the rank is gone, and goes to the disk, which may be slow, after it: until then all
        # ranks wait.
        if not sign.stopped and sign.suspects:  # a stopped rank does not hang because of a sample
            detector.notes.leave(sign.step, sign.suspects, why, rank)
        marker = {"end": str(End.FENCED), "detail": f"{why}{where}", "time": ""}
        FILES.keep(marker_file(run_dir, rank), json.dumps(marker).encode() + b"\n")
        board.kill(rank)
        say(f"killed rank {rank}{where}: {why}")
        FILES.flush()
