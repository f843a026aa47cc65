"""What each rank does now: by the board of its host where that is at hand, otherwise as far as the records go."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from recover.liveness.board import COLUMNS, Board
from recover.records.kinds import Line
from recover.records.stories import Death

GONE, UNKNOWN, STOPPED, DONE = "gone", "not known", "stopped", "done"


def session_of(start: Line) -> Path | None:
    """The session of a job that runs on this host, for whoever may look into it."""
    session = start.get("session")
    try:
        return Path(session) if session and (Path(session) / "board").exists() else None
    except OSError:  # another user's
        return None


def ranks_now(
    start: Line, job: Sequence[Line], gone: Mapping[int, Death], joined: Collection[int], last: Line
) -> list[dict[str, Any]]:
    """One entry per rank: what it does, since when (seconds since 1970), in which step, over which slots."""
    size, count = int(start.get("replica_size", 1)), int(start.get("ranks", 0))
    exits = {
        line["rank"]: line for line in job if line["what"] == "exit" and line["at"] >= start.get("at", 0.0)
    }
    board = _board(start)
    found = []
    for rank in [*range(count), *sorted(rank for rank in joined if rank >= count)]:
        entry: dict[str, Any] = {"rank": rank, "replica": rank // size, "host": start.get("host", "")}
        if rank in gone or rank in exits:
            line = exits.get(rank, {})
            well = rank not in gone and line.get("words", {}).get("end") == "done"
            why = gone[rank].cause.short if rank in gone else ""
            entry |= {"doing": DONE if well else GONE, "since": line.get("at"), "why": why}
            entry |= {"step": line.get("step", 0), "slots": []}
        elif board is not None and rank < board.size and board.is_here(rank):
            now, state = board.now(rank), board.state(rank)
            doing = STOPPED if state in ("T", "t") else now.doing if state else GONE
            entry |= {"doing": doing, "since": round(time.time() - now.seconds, 1)}
            entry |= {"step": now.step, "slots": list(now.slots)}
        else:
            entry |= {"doing": UNKNOWN, "since": last.get("at"), "step": last.get("step", 0), "slots": []}
        found.append(entry)
    return found


def _board(start: Line) -> Board | None:
    session = session_of(start)
    if session is None:
        return None
    try:
        return Board(session / "board", (session / "board").stat().st_size // (8 * COLUMNS))
    except (OSError, ValueError):  # it went just now
        return None
