"""Broken links: when a reduction must be aborted although no rank has died.

Every rank shows on its board whether it waits for others (in a reduction whose data are complete,
or in an agreement), in which epoch, and how much it has carried so far. The ranks of a host read
each other's rows; rows of other hosts come by way of their agents. A rank that computes is not
waiting, so however slow it is, no time counts. Only if all members of a group wait, and none of
them has carried anything for `link_timeout`, the network between them is at fault: the rank that
finds this frees the group, all members come to the vote, and a repair follows.

Why this never hits a slow rank: operations have the same order on all members, so the lowest
operation that is open anywhere was posted by every member that waits. If all of them wait, it can
only wait for the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from recover.world.carriers.worker import Worker
from recover.world.cross_group import CrossGroup
from recover.world.liveness.board import CARRIED, HEARTBEAT, WAITS, Board
from recover.world.watchdog import ASLEEP

IDLE = 0.5  # seconds without an ended operation, before a rank examines what it waits for
SILENT = 5.0  # seconds without a heartbeat after which a rank is unknown; half of the limit, if that is less
ELSEWHERE = 0.5  # seconds between two reads of the rows of other hosts


@dataclass(frozen=True)
class Shown:
    """The part of a member's row that concerns links."""

    heartbeat: int
    waits_in: int  # the epoch in which it waits for others; 0: it computes
    carried: int  # grows while its operations end, or their bytes travel


class LinkWatchdog:
    """Judges from the rows of all members whether a group has made no progress for `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self._limit, self._silent = limit, min(SILENT, limit / 2)
        self._since = self._looked = float("-inf")
        self._shown: dict[int, Shown | None] = {}
        self._heard: dict[int, float] = {}

    def look(self, epoch: int, members: Mapping[int, Shown | None], now: float) -> bool:
        """Whether the group has made no progress for the limit. `members`: all of the group, this
        rank included; None for a rank without a row."""
        slept, self._looked = now - self._looked > ASLEEP, now
        before, self._shown = self._shown, dict(members)
        for rank, shown in members.items():
            known = before.get(rank)
            if known is None or shown is None or known.heartbeat != shown.heartbeat:
                self._heard[rank] = now
        still = all(
            shown is not None
            and shown.waits_in == epoch
            and (known := before.get(rank)) is not None
            and known.carried == shown.carried
            and now - self._heard[rank] <= self._silent
            for rank, shown in members.items()
        )
        if slept or not still:
            self._since = now
        return still and now - self._since > self._limit


class Links:
    """Writes this rank's own row, and watches its group."""

    def __init__(
        self,
        rank: int,
        board: Board,
        worker: Worker,
        limit: float,
        elsewhere: Callable[[], Mapping[int, Sequence[int]]] = dict,
    ) -> None:
        self._rank, self._board, self._worker, self._elsewhere = rank, board, worker, elsewhere
        self._limit = limit
        self._watchdog = LinkWatchdog(limit)
        self._ended, self._ended_at = -1, float("-inf")
        self._told: Mapping[int, Sequence[int]] = {}
        self._told_at = float("-inf")

    def look(self, cross: CrossGroup | None, epoch: int, waits: bool, now: float) -> str:
        """Why the group must be aborted; "" if it need not be.

        `waits`: in an agreement, or in a repair.
        """
        ended = self._worker.ended
        if ended != self._ended:
            self._ended, self._ended_at = ended, now
        idle = now - self._ended_at > IDLE
        # Data on a device are complete once the device has reached them. Asking the device costs
        # time, so only when idle.
        at_wire = idle and cross is not None and cross.error is None and self._worker.is_at_wire
        carried = ended + (cross.carried if at_wire and cross is not None else 0)
        self._board.wait(self._rank, epoch if at_wire or waits else 0, carried)
        if not at_wire or cross is None or cross.size < 2:
            return ""
        if not self._watchdog.look(epoch, {rank: self._shown(rank, now) for rank in cross.peers}, now):
            return ""
        ranks = ", ".join(map(str, cross.peers))
        return (
            f"no byte has travelled between ranks {ranks} for {self._limit:g} s (link timeout), while all of them wait "
            "for it: a link between two of them is broken"
        )

    def _shown(self, rank: int, now: float) -> Shown | None:
        row: Sequence[int] | None = self._board.row(rank) if self._board.is_here(rank) else None
        if row is None:
            if now - self._told_at > ELSEWHERE:
                self._told, self._told_at = self._elsewhere(), now
            row = self._told.get(rank)
        return None if row is None else Shown(row[HEARTBEAT], row[WAITS], row[CARRIED])
