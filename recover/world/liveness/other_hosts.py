"""The rows of ranks on other hosts, as a file in the session of this host.

Agents exchange the rows of their ranks; each writes what it receives into its session. The rows are
those of the board, except that the column `SINCE` is in nanoseconds since 1970: the monotonic clock
of a host means nothing on another one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from recover.world.liveness.board import SINCE, now_of
from recover.world.liveness.signs import Now

_NAME = "elsewhere.json"
Rows = Mapping[int, tuple[list[int], str]]  # by rank: its row, and the state of its process


def told(rows: Rows) -> dict[str, list[object]]:
    """The rows of this host's ranks, for other hosts."""
    later = time.time_ns() - time.monotonic_ns()
    return {
        str(rank): [[*row[:SINCE], row[SINCE] + later if row[SINCE] else 0, *row[SINCE + 1 :]], state]
        for rank, (row, state) in rows.items()
    }


def leave(session: Path, heard: Mapping[int, Sequence[object]]) -> None:
    """Write the rows of other hosts. Errors are ignored: training does not depend on it."""
    draft = session / f".{_NAME}"
    try:
        draft.write_text(json.dumps(heard))
        os.replace(draft, session / _NAME)
    except OSError:
        pass


def found(session: Path) -> dict[int, tuple[Now, str]]:
    """The activity of each rank and the state of its process, by rank, about half a second ago."""
    return {rank: (now_of(row, time.time_ns()), state) for rank, (row, state) in _heard(session).items()}


def rows(session: Path) -> dict[int, Sequence[int]]:
    """The row of each rank, by rank, about half a second ago."""
    return {rank: row for rank, (row, _) in _heard(session).items()}


def _heard(session: Path) -> Rows:
    try:
        return {int(rank): told for rank, told in json.loads((session / _NAME).read_text()).items()}
    except (OSError, ValueError):
        return {}
