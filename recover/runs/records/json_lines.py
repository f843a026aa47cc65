"""Files of JSON lines that grow while they are read, and whose writer may die in the middle of a line.

Every rank keeps the latest lines in memory, the same on all ranks. One rank writes. When it dies, its successor cuts
off an unfinished last line, finds out how far the file goes, and appends what is missing.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, TypeVar

from recover.job.record_files import FILES, TornError
from recover.runs.records.kinds import Line

R = TypeVar("R", bound=Mapping[str, Any])
KEPT = 1024  # written lines that stay in memory: more than a writer that dies may have left unwritten
MOST = 100_000  # lines in memory while the disk takes none; beyond this number the oldest are lost
BATCH = 64  # lines that are written at once: after a time without room there may be many
_END = 1 << 16  # bytes: a few lines


@dataclass
class Lines:
    """The content of a file."""

    whole: list[Any] = field(default_factory=list)
    unreadable: int = 0  # lines without a record, except for an unfinished last one
    torn: bool = False  # the last line is unfinished: its writer is writing it, or has died


def read(path: Path, key: str = "step") -> Lines:
    """Read a whole file, even if its writer has died. A last line without a line break counts if it holds a whole
    record."""
    found = Lines()
    if not path.exists():
        return found
    *ended, rest = path.read_bytes().split(b"\n")
    for text in filter(bytes.strip, ended):
        line = parse(text, key)
        if line is None:
            found.unreadable += 1
        else:
            found.whole.append(line)
    found.torn = bool(rest)
    if (line := parse(rest, key)) is not None:
        found.whole.append(line)
    return found


def read_lines(path: Path) -> Iterator[Line]:
    """The finished lines of an intact file. Raises ValueError if it is damaged."""
    if path.exists():
        for line in FILES.disk.read(path).split(b"\n")[:-1]:
            yield json.loads(line)


def parse(text: bytes, key: str = "step") -> Line | None:
    """The record in a line; None if there is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and isinstance(value.get(key), int | float) else None


class LineFile(Generic[R]):
    """A file of JSON lines with ascending keys, and the latest of them in memory."""

    def __init__(self, path: Path, *key: str) -> None:
        self.kept: deque[R] = deque()
        # This job writes from this key on; lines that earlier jobs left from there on are removed.
        self.since: tuple[int, ...] | None = None
        self._path, self._key = path, key
        # Key of the last line in the file; None: this rank does not know it.
        self._written: tuple[int, ...] | None = None
        self._forgot = False  # some lines of this job are no longer in memory
        self.lost = 0  # lines that were dropped from memory before they could be written

    @property
    def path(self) -> Path:
        return self._path

    def write(self) -> None:
        """Append the missing lines; idempotent. Raises OSError if the disk does not take them."""
        try:
            if self._written is None:
                self._written = self._cut_unfinished()
            missing = self.missing()
            for first in range(0, len(missing), BATCH):
                batch = missing[first : first + BATCH]
                text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in batch).encode()
                FILES.disk.append(self._path, text)
                self._written = self._key_of(batch[-1])
            self._forget(len(self.kept) - KEPT)
        except TornError:
            self._written = None
            raise
        finally:
            if (more := len(self.kept) - MOST) > 0:
                self.lost += max(0, len(self.missing()) - MOST)
                self._forget(more)

    def missing(self) -> list[R]:
        """The lines that are not in the file, as far as this rank knows."""
        written = self._written or tuple(0 for _ in self._key)
        return list(takewhile(lambda line: self._key_of(line) > written, reversed(self.kept)))[::-1]

    def all(self) -> list[Line]:
        """The lines in the file, and those that it lacks."""
        try:
            there = list(read_lines(self._path))
        except (OSError, ValueError):
            there = []
        reached = self._key_of(there[-1]) if there else tuple(0 for _ in self._key)
        return there + [dict(line) for line in self.kept if self._key_of(line) > reached]

    def leave_to_another(self) -> None:
        """Called while another rank is the writer. If this rank becomes the writer again, it checks how far
        the file goes."""
        self._written = None
        if len(self.kept) >= 2 * KEPT:  # rare: the disk of the writer may have been full for longer than that
            reached = self._reached()
            on_disk = sum(1 for _ in takewhile(lambda line: self._key_of(line) <= reached, self.kept))
            self._forget(max(min(on_disk, len(self.kept) - KEPT), len(self.kept) - MOST))

    def take_over(self, lines: Iterable[R]) -> None:
        """Take the lines that other ranks hold, on a joining rank; may be called again."""
        self.kept.clear()
        self.kept.extend(lines)
        self._forgot = len(self.kept) >= KEPT

    def _forget(self, count: int) -> None:
        for _ in range(count):
            self._forgot = True
            self.kept.popleft()

    def _reached(self) -> tuple[int, ...]:
        """Key of the last whole line of the file. If it cannot be read: zeros, so that no line is dropped."""
        try:
            *_, last = FILES.disk.read_end(self._path, _END).splitlines(keepends=True)
            return self._key_of(json.loads(last))
        except (OSError, ValueError, KeyError, TypeError):
            return tuple(0 for _ in self._key)

    def cut_after(self, step: int) -> None:
        """Remove the lines of later steps: a run that is resumed from a checkpoint takes them again."""
        lines = [line for line in read_lines(self._path) if line["step"] <= step]
        self._written = None
        FILES.disk.replace(self._path, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def _cut_unfinished(self) -> tuple[int, ...]:
        """Cut off an unfinished last line; returns the key that the file reaches."""
        if not self._path.exists():
            return tuple(0 for _ in self._key)
        data = FILES.disk.read(self._path)
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            FILES.disk.truncate(self._path, whole)
        lines = data[:whole].splitlines(keepends=True)
        kept = {self._key_of(line): line for line in self.kept}
        mine = min(kept, default=None)
        if self.since is not None and not self._forgot:  # all lines of this job are still in memory
            mine = self.since
        at, reached = 0, tuple(0 for _ in self._key)
        for text in lines:
            line = json.loads(text)
            key = self._key_of(line)
            if mine is not None and key >= mine and not _same(line, kept.get(key)):
                # Only dead ranks saw this commit: the result of an agreement is lost if all ranks that know it die.
                FILES.disk.truncate(self._path, at)
                break
            at, reached = at + len(text), key
        return reached

    def _key_of(self, line: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(line[name] for name in self._key)


def _same(line: Mapping[str, Any], mine: Mapping[str, Any] | None) -> bool:
    """Whether lines of two ranks record the same step or incident. Times and places differ between ranks."""
    if mine is None:
        return False
    own = ("seconds", "at", "location")
    names = {name for name in (*line, *mine) if name not in own and not name.endswith("_ms")}
    return all(line.get(name) == mine.get(name) for name in names)
