"""The activity of each rank: from the board of this host; for ranks on other hosts from this host's agent; otherwise
from the records."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from recover.runs.records.job_state import session_of
from recover.runs.records.kinds import Line
from recover.runs.records.root_causes import Death
from recover.world.liveness import other_hosts
from recover.world.liveness.board import COLUMNS, Board
from recover.world.liveness.signs import Now

GONE, UNKNOWN, STOPPED, DONE, JOINING = "gone", "not known", "stopped", "done", "joining"
LEFT = "left on notice"
ENDING = "ending"  # of the board's activities


def ranks_now(
    start: Line,
    job: Sequence[Line],
    gone: Mapping[int, Death],
    joined: Collection[int],
    last: Line,
    seats: Mapping[str, Any],
    is_over: bool = False,
    left: Collection[int] = (),
) -> list[dict[str, Any]]:
    """One entry per rank: what it does, since when (seconds since 1970), in which step, with which slots, on which
    host.

    `seats`: the hosts of the ranks, in a job on several hosts. `is_over`: the job has ended, so no rank is there.
    `left`: ranks that left on notice.
    """
    size, count = int(start.get("replica_size", 1)), int(start.get("ranks", 0))
    exits = {
        line["rank"]: line for line in job if line["what"] == "exit" and line["at"] >= start.get("at", 0.0)
    }
    session = None if is_over else session_of(start)
    board, others = (_board(session), other_hosts.found(session)) if session else (None, {})
    # Ranks that are about to join are only on the boards.
    there = {*(board.living() if board else ()), *others}
    coming = {rank for rank in there if rank >= count} - {*joined, *gone, *exits}

    def activity(rank: int) -> dict[str, Any]:
        if rank in gone or rank in exits or rank in left:
            return _exited(exits.get(rank, {}), gone.get(rank), rank in left)
        if board is not None and rank < board.size and board.is_here(rank):
            return _shown(board.now(rank), board.state(rank), rank in coming)
        if rank in others:
            return _shown(*others[rank], rank in coming)
        return {
            "doing": GONE if is_over else UNKNOWN,
            "since": last.get("at"),
            "step": last.get("step", 0),
            "slots": [],
        }

    return [
        {
            "rank": rank,
            "replica": rank // size,
            "host": (seats.get(str(rank)) or start).get("host", ""),
            **activity(rank),
        }
        for rank in [*range(count), *sorted({*coming, *(rank for rank in joined if rank >= count)})]
    ]


def _exited(line: Line, death: Death | None, left: bool) -> dict[str, Any]:
    is_done = death is None and line.get("words", {}).get("end") == "done"
    return {
        "doing": LEFT if left else DONE if is_done else GONE,
        "since": line.get("at"),
        "why": death.cause.short if death else "",
        "step": line.get("step", 0),
        "slots": [],
    }


def _shown(now: Now, state: str, coming: bool) -> dict[str, Any]:
    does = JOINING if coming else now.doing
    # A rank that was ending has ended as it should, until the launcher has recorded something else.
    doing = STOPPED if state in ("T", "t") else does if state or does == ENDING else GONE
    since = round(time.time() - now.seconds, 1)
    return {"doing": doing, "since": since, "step": now.step, "slots": list(now.slots)}


def _board(session: Path) -> Board | None:
    try:
        return Board(session / "board", (session / "board").stat().st_size // (8 * COLUMNS))
    except (OSError, ValueError):  # it exited just now
        return None
