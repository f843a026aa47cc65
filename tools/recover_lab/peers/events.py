"""Events of a run: one line per event and rank, written at once, so that a killed rank has noted everything before.

Imports little: the checkpoint-restart baseline pays for every import at each of its restarts.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from recover.runs.records.json_lines import read
from recover.runs.records.kinds import Event


class Events:
    """Event file of one rank."""

    def __init__(self, directory: Path, rank: int, life: int = 0) -> None:
        self._file = os.open(
            directory / f"events-{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
        )
        self._same = {"rank": rank, "life": life}

    def note(self, what: str, at: float | None = None, **facts: Any) -> None:
        event = {"at": time.time() if at is None else at, "what": what, **self._same, **facts}
        os.write(self._file, json.dumps(event).encode() + b"\n")


def read_events(directory: Path) -> list[Event]:
    """Events of all ranks, by time."""
    lines = [line for path in directory.glob("events-*.jsonl") for line in read(path, key="at").whole]
    return sorted(lines, key=lambda event: event["at"])
