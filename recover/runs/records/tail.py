"""A file of JSON lines, read while it grows: each look tells what is new, or that all before it counts no more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from recover.runs.records.json_lines import parse
from recover.runs.records.kinds import Line


class Tail:
    """The finished lines of a file. It may be cut by a successor of its writer, or replaced by what stays of an earlier
    run; then `read` starts again from its beginning and says so.

    `key`: what every record of this file has, a number. Lines without it are counted and left out.
    """

    def __init__(self, path: Path, key: str = "step") -> None:
        self._path, self._key = path, key
        self._file, self._at = 0, 0
        self._last = b""  # the last line that was read: what is no longer there was cut, and has grown again
        self.unreadable = 0

    def skip(self) -> None:
        """Leave out what is there already."""
        self.read()

    def read(self) -> tuple[list[Line], bool]:
        """The lines that are new, and whether those told before are to be forgotten."""
        try:
            with open(self._path, "rb") as file:
                found = os.fstat(file.fileno())
                file.seek(max(0, self._at - len(self._last)))
                intact = (
                    self._file == found.st_ino
                    and found.st_size >= self._at
                    and file.read(len(self._last)) == self._last
                )
                anew = not intact and self._at > 0
                if not intact:
                    self._file, self._at, self._last, self.unreadable = found.st_ino, 0, b"", 0
                    file.seek(0)
                text = file.read()
        except OSError:  # not there yet, or not to be read just now
            return [], False
        whole = text[: text.rfind(b"\n") + 1]
        if not whole:
            return [], anew
        self._at += len(whole)
        lines = whole.splitlines(keepends=True)
        self._last = lines[-1]
        read = [parse(line, self._key) for line in lines if line.strip()]
        self.unreadable += read.count(None)
        return [line for line in read if line is not None], anew


class Follower:
    """The finished lines that were added to a file since the last look, each told once, whatever becomes of it.

    Lines are in the order of their steps, and in one step of their epochs: what comes behind the last one is new.
    """

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._tail.skip()  # of an earlier run, and about to be replaced
        self._told = (-1, -1)  # the last one

    def read(self) -> list[Any]:
        lines, _ = self._tail.read()
        fresh = {(line["step"], line.get("epoch") or 0): line for line in lines}
        untold = [line for key, line in fresh.items() if key > self._told]
        self._told = max([self._told, *fresh])
        return untold
