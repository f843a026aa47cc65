"""Reads what W&B wrote in its offline mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

# A file of W&B is a log as LevelDB writes it; its first bytes are a header, too.
BLOCK, HEADER = 32768, 7
FULL, LAST = 1, 4


def histories(place: Path, run: str) -> list[list[dict[str, Any]]]:
    """Rows of each offline run with this id below `place`, in the order in which they were begun."""
    files = sorted(place.rglob(f"offline-run-*-{run}/run-{run}.wandb"))
    return [
        [
            {item.nested_key[0] or item.key: json.loads(item.value_json) for item in record.history.item}
            for record in _records(file.read_bytes())
            if record.HasField("history")
        ]
        for file in files
    ]


def _records(data: bytes) -> Iterator[Record]:
    place, parts = HEADER, b""
    while place + HEADER <= len(data):
        if (left := BLOCK - place % BLOCK) < HEADER:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in (FULL, LAST):
            yield Record.FromString(parts)
            parts = b""
