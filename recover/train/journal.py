"""`steps.jsonl` and `incidents.jsonl`: one survivor writes, all of them remember.

Every rank holds the latest lines in memory, and they are the same everywhere. The lowest living rank writes. When it
dies, the next one cuts off what the dead one may have left half written, looks how far the file goes, and appends
what is missing. A repair does not end before the dead are gone, so there are never two writers.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from recover.train.sinks import Sinks
from recover.world import ending
from recover.world.world import World

KEPT = 1024  # lines in memory: more than are ever missing, even where the disk is full for a while

Line = dict[str, Any]


def read_lines(path: Path) -> Iterator[Line]:
    """Whole lines only: the last one may be half written."""
    if path.exists():
        for line in path.read_bytes().split(b"\n")[:-1]:
            yield json.loads(line)


class LineFile:
    """A file of JSON lines, each with a higher key than the one before, and the latest of them in memory."""

    def __init__(self, path: Path, *key: str) -> None:
        self.kept: deque[Line] = deque(maxlen=KEPT)
        self._path, self._key = path, key
        self._written: tuple[int, ...] | None = None  # None: this rank cannot vouch for the file

    def write(self) -> None:
        """Append what is missing. Done twice, it changes nothing."""
        if self._written is None:
            self._written = self._mend()
        missing = [line for line in self.kept if self._key_of(line) > self._written]
        if not missing:
            return
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in missing).encode()
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            self._written = None
            while text:
                text = text[os.write(file, text) :]
            self._written = self._key_of(missing[-1])
        finally:
            os.close(file)

    def cut_after(self, step: int) -> None:
        """Drop the lines of later steps: a run that goes on from a checkpoint does them again."""
        lines = [line for line in read_lines(self._path) if line["step"] <= step]
        draft = self._path.with_suffix(".tmp")
        draft.write_text("".join(json.dumps(line) + "\n" for line in lines))
        draft.replace(self._path)
        self._written = None

    def _mend(self) -> tuple[int, ...]:
        """Cut off a torn tail and say how far the file goes."""
        if not self._path.exists():
            return tuple(0 for _ in self._key)
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self._path, whole)
        lines = data[:whole].splitlines(keepends=True)
        kept = {self._key_of(line): line for line in self.kept}
        at, reached = 0, tuple(0 for _ in self._key)
        for text in lines:
            line = json.loads(text)
            key = self._key_of(line)
            if kept and key >= min(kept) and not _same(line, kept.get(key)):
                # Only the dead have seen this commit: an agreement's result can die with all who held it.
                os.truncate(self._path, at)
                break
            at, reached = at + len(text), key
        return reached

    def _key_of(self, line: Line) -> tuple[int, ...]:
        return tuple(line[name] for name in self._key)


def _same(line: Line, mine: Line | None) -> bool:
    """Whether two ranks tell of the same step or incident; each noticed it by its own clock, in its own place."""
    if mine is None:
        return False
    own = ("seconds", "location")
    names = {name for name in (*line, *mine) if name not in own and not name.endswith("_ms")}
    return all(line.get(name) == mine.get(name) for name in names)


class Journal:
    """What a run writes down about its steps and its losses."""

    def __init__(self, run_dir: Path, world: World, sinks: Sinks) -> None:
        self.steps = LineFile(run_dir / "steps.jsonl", "step")
        self.incidents = LineFile(run_dir / "incidents.jsonl", "step", "epoch")
        self._world, self._sinks = world, sinks
        self._complained = False

    @property
    def writing(self) -> bool:
        """Whether it is this rank that writes: the same answer about the same rank on all survivors."""
        return self._world.members[0] == self._world.rank

    def commit(self, line: Line, incidents: Sequence[Line]) -> None:
        """A step is committed. A full disk does not end the run: the lines stay in memory until there is room."""
        self.steps.kept.append(line)
        self.incidents.kept.extend(incidents)
        try:
            self.write()
        except OSError as error:
            if not self._complained:
                self._complained = True
                text = f"{error}; the run goes on, and lines are kept in memory until they can be written"
                ending.log(text)
                print(f"recover: {text}", flush=True)

    def write(self) -> None:
        """Write what is not written yet, if it is this rank that writes."""
        if self.writing:
            self.incidents.write()
            self.steps.write()
            self._sinks.log(self.steps.kept)


def settle(world: World, act: Callable[[], object], lost: Callable[[tuple[int, ...], float], object]) -> None:
    """Nobody goes on before `act` has been done by a rank that lived to the end of it.

    Every survivor calls `act`, which finds out whether it is this rank that has something to do; after a death, again.
    `lost` is told of ranks that died meanwhile and of how long the repair took.
    """
    while True:
        act()
        if world.agree(1) is not None:
            return
        census = world.repair()
        lost(census.lost, census.seconds)
