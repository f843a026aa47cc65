"""The feed of a run: committed steps, each with the incidents that were repaired in it, read while the files grow.

Every reader of `steps.jsonl` and `incidents.jsonl` goes through `RunFeed`: the terminal, the launcher's announcements,
traces, the live page and reports. It asks no rank for anything.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from recover.runs.records.json_lines import parse
from recover.runs.records.kinds import Line


class FeedUpdate(NamedTuple):
    """Records that were written since the last read."""

    steps: list[tuple[Any, list[Any]]]  # each committed step with the incidents that were repaired in it
    incidents: list[Any]  # all new incidents, also those whose step is not committed yet
    restarted: bool  # a file was cut or replaced: what was read before may be rolled back


class RunFeed:
    """Steps and incidents of one run, each delivered once and in order.

    `new_only`: lines that are in the files already belong to an earlier job and are left out, also if that job's files
    are cut or rewritten afterwards. A feed without it starts at the beginning of the run; after an update that is
    `restarted`, its reader discards everything and starts a new feed.
    """

    def __init__(self, run_dir: Path, new_only: bool = False) -> None:
        self._steps = _Tail(run_dir / "steps.jsonl", ("step",))
        self._incidents = _Tail(run_dir / "incidents.jsonl", ("step", "epoch"))
        self._pending: deque[Any] = deque()
        if new_only:
            self._steps.skip()
            self._incidents.skip()

    @property
    def pending(self) -> list[Any]:
        """Incidents whose step is not committed; at the end of a run, those after its last step."""
        return list(self._pending)

    @property
    def unreadable(self) -> int:
        """Lines that hold no record, an unfinished last one aside."""
        return self._steps.unreadable + self._incidents.unreadable

    def read(self, unfinished: bool = False) -> FeedUpdate:
        """Read what is new. `unfinished`: also a last line without its line break, if it holds a whole record."""
        # Steps before incidents. The writer appends the incidents of a step before the step itself, so a reader that
        # takes the files in the opposite order has all incidents of every step that it has seen.
        steps, steps_restarted = self._steps.read(unfinished)
        incidents, incidents_restarted = self._incidents.read(unfinished)
        self._pending.extend(incidents)
        return FeedUpdate(
            list(with_incidents(steps, self._pending)), incidents, steps_restarted or incidents_restarted
        )


def with_incidents(steps: Iterable[Line], incidents: deque[Line]) -> Iterator[tuple[Line, list[Line]]]:
    """Each step with the incidents that were repaired in it: an incident belongs to the first step that is committed
    at or after its own number. `incidents` are in order; those of the given steps are taken out."""
    for step in steps:
        inside = []
        while incidents and incidents[0]["step"] <= step["step"]:
            inside.append(incidents.popleft())
        yield step, inside


class _Tail:
    """The finished lines of one file, in the order of their keys, each delivered once.

    The writer's successor may cut the file and append again, and a resumed run replaces it by the lines that stay:
    then the file is read again from its beginning.
    """

    def __init__(self, path: Path, key: tuple[str, ...]) -> None:
        self._path, self._key = path, key
        self._delivered: tuple[float, ...] = ()  # the key of the last record
        self._earlier = array("q")  # hashes of the lines of an earlier job
        self.unreadable = 0
        self._rewind(inode=0)

    def _rewind(self, inode: int) -> None:
        self._inode, self._at = inode, 0
        # The last line that was read. If it is no longer there, the file was cut and has grown again.
        self._last = b""
        self._lines = 0  # finished lines up to `_at`
        self._still_earlier = True  # all of them were lines of the earlier job

    def skip(self) -> None:
        """Leave out the lines that are in the file now."""
        lines, _ = self._new_lines(unfinished=False)
        self._earlier.extend(map(hash, lines))
        self._lines = len(lines)

    def read(self, unfinished: bool) -> tuple[list[Line], bool]:
        """Returns the new records, and whether the file was cut or replaced."""
        lines, restarted = self._new_lines(unfinished)
        if restarted:
            self.unreadable = 0
        records = []
        for text in lines:
            if self._is_earlier(text) or not text.strip():
                continue
            record = parse(text)
            if record is None:
                self.unreadable += text.endswith(b"\n")
                continue
            # A script may keep a file of its own under this name: nothing but `step` is certain to be a number.
            key = tuple(n if isinstance(n := record.get(name), int | float) else 0 for name in self._key)
            if key > self._delivered:  # otherwise a successor has written the same line once more
                self._delivered = key
                records.append(record)
        return records, restarted

    def _is_earlier(self, text: bytes) -> bool:
        # A successor and a resumed run only ever cut the end of an earlier job's file. The lines that stay are
        # therefore a prefix of it: the first line that differs ends it.
        number, self._lines = self._lines, self._lines + 1
        self._still_earlier &= number < len(self._earlier) and hash(text) == self._earlier[number]
        return self._still_earlier

    def _new_lines(self, unfinished: bool) -> tuple[list[bytes], bool]:
        try:
            with open(self._path, "rb") as file:
                found = os.fstat(file.fileno())
                file.seek(max(0, self._at - len(self._last)))
                is_intact = (
                    self._inode == found.st_ino
                    and found.st_size >= self._at
                    and file.read(len(self._last)) == self._last
                )
                restarted = not is_intact and self._at > 0
                if not is_intact:
                    self._rewind(found.st_ino)
                    file.seek(0)
                text = file.read()
        except OSError:  # not there yet, or not readable just now
            return [], False
        whole = len(text) if unfinished else text.rfind(b"\n") + 1
        lines = text[:whole].splitlines(keepends=True)
        if lines:
            self._at += whole
            self._last = lines[-1]
        return lines, restarted
