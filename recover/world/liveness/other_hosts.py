"""What the ranks of other hosts do, where whoever looks on finds it: beside the board of this host.

Agents tell each other how far their ranks are; each leaves what it hears in its session. Rows are as on the board, but
for the clock: the column `SINCE` is in nanoseconds since 1970, for the clocks of a host mean nothing on another one.
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
Rows = Mapping[int, tuple[list[int], str]]  # by rank: its row, and the kernel's letter for its process


def told(rows: Rows) -> dict[str, list[object]]:
    """The rows of this host's ranks as others can read them."""
    later = time.time_ns() - time.monotonic_ns()
    return {
        str(rank): [[*row[:SINCE], row[SINCE] + later if row[SINCE] else 0, *row[SINCE + 1 :]], state]
        for rank, (row, state) in rows.items()
    }


def leave(session: Path, heard: Mapping[int, Sequence[object]]) -> None:
    """All that was heard of other hosts. Nobody's training depends on it."""
    draft = session / f".{_NAME}"
    try:
        draft.write_text(json.dumps(heard))
        os.replace(draft, session / _NAME)
    except OSError:
        pass


def found(session: Path) -> dict[int, tuple[Now, str]]:
    """By rank: what it does, and the kernel's letter for its process, half a second ago or so."""
    return {rank: (now_of(row, time.time_ns()), state) for rank, (row, state) in _heard(session).items()}


def rows(session: Path) -> dict[int, Sequence[int]]:
    """By rank: its row, half a second ago or so."""
    return {rank: row for rank, (row, _) in _heard(session).items()}


def _heard(session: Path) -> Rows:
    try:
        return {int(rank): told for rank, told in json.loads((session / _NAME).read_text()).items()}
    except (OSError, ValueError):
        return {}
