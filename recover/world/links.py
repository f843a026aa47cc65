"""When a reduction must be given up although nobody has died: a link between two of its members is broken.

Every rank shows on its board whether it waits for the others (in a reduction whose data it has handed over, or in an
agreement), in which epoch, and how much it has carried so far. The ranks of a host read each other's rows; those of
other hosts come by way of their agents. A rank that computes is not waiting, so however slow it is, no time counts.
Only when all members of a group wait, and none of them has carried anything for `link_timeout`, the wire between them
is at fault: whoever finds so frees the group, all come to the vote, and a repair follows.

Why this can never hit a slow rank: operations have an order, the same on all members, so the lowest operation that is
open anywhere was posted by every member that waits. If all wait, it is only the wire that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from recover.world.carriers.worker import Worker
from recover.world.cross_group import CrossGroup
from recover.world.liveness.board import CARRIED, HEARTBEAT, WAITS, Board
from recover.world.watchdog import ASLEEP

IDLE = 0.5  # seconds in which nothing has ended, before a rank looks closer at what it waits for
SILENT = 5.0  # seconds without a heartbeat after which nothing is known of a rank; half of the limit, if that is less
ELSEWHERE = 0.5  # seconds between two looks at what is told of other hosts


@dataclass(frozen=True)
class Shown:
    """What a member of a group shows of itself."""

    heartbeat: int
    waits_in: int  # the epoch in which it waits for others; 0: it is busy by itself
    carried: int  # grows while its operations end, or bytes of theirs travel


class LinkWatchdog:
    """Fed with what all members of a group show; says when the group has stood still for `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self._limit, self._silent = limit, min(SILENT, limit / 2)
        self._since = self._looked = float("-inf")
        self._shown: dict[int, Shown | None] = {}
        self._heard: dict[int, float] = {}

    def look(self, epoch: int, members: Mapping[int, Shown | None], now: float) -> bool:
        """`members`: all of the group, this rank included; None where nothing is known of one."""
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
    """This rank's end: it shows what it does, and watches over its own group."""

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
        """Why the group must be given up; "" if it need not be. `waits`: in an agreement, or in a repair."""
        ended = self._worker.ended
        if ended != self._ended:
            self._ended, self._ended_at = ended, now
        idle = now - self._ended_at > IDLE
        # What lies on a device is handed over when the device comes to it. To ask it is left for when it matters.
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
