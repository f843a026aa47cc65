"""Passes the output of processes on, stdout and stderr apart, in whole lines where possible.

Lines of a rank that has its own pipe are labelled. A line that is redrawn (a progress bar: it ends
in a carriage return, or in nothing) is passed on as it is drawn; output of another rank begins a
new line.
"""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from recover.job.output import OUTLET
from recover.job.record_files import FILES
from recover.launch import rank_outputs
from recover.launch.rank_outputs import label

PATIENCE = (
    0.05  # seconds that an unfinished line is held back: it may be finished by then, and must not be torn
)
_CONTROL = rb"(?:\x1b\[[0-?]*[ -/]*[@-~]|[\r\n])"  # moves the cursor or sets colours: no text yet
_FIRST_WORD = re.compile(_CONTROL + rb"*(?=[^\r\n\x1b])")
_NEXT_WORD = re.compile(rb"[\r\n]" + _CONTROL + rb"*(?=[^\r\n\x1b])")
_AT_BEGINNING = re.compile(rb"[\r\n]" + _CONTROL + rb"*$")
# A message of the event library inside mpirun: a pipe was closed while it was polled, which has no
# consequence.
_NOISE = re.compile(rb"^\[warn\] Epoll .*\n", re.MULTILINE)
_HALF_CONTROL = re.compile(rb"\x1b(\[[0-?]*[ -/]*)?$")


class _Source:
    """A writer to stdout or stderr (`target`), with a label (`name`) or without."""

    def __init__(self, target: int, name: bytes = b"", copy: Path | None = None) -> None:
        self.target, self.name = target, name
        self.held, self.since = b"", 0.0
        self.at_beginning = True  # of a line: text that comes now is labelled
        self.copy = None if copy is None else FILES.open_to_append(copy)


class Relay:
    """Reads pipes, each time the caller pumps, and reports whether there was output.

    `outputs`: descriptors of ranks, with rank and stream (from `rank_outputs.make`). `copies`: a
    directory in which their output is also written, to a file for each rank.
    """

    def __init__(
        self,
        *processes: subprocess.Popen[bytes],
        outputs: Mapping[int, tuple[int, int]] | None = None,
        copies: Path | None = None,
    ) -> None:
        self._selector = selectors.DefaultSelector()
        self._screen: dict[int, _Source | None] = {1: None, 2: None}  # the writer of an unfinished line
        self._one_screen = os.isatty(1) and os.isatty(2)
        self._pipes = 0  # of processes; those of ranks may never have been taken
        for process in processes:
            self.add(process)
        self._read(outputs or {}, copies)

    def add(
        self,
        process: subprocess.Popen[bytes],
        outputs: Mapping[int, tuple[int, int]] | None = None,
        copies: Path | None = None,
    ) -> None:
        for pipe, target in ((process.stdout, 1), (process.stderr, 2)):
            if pipe is None:  # the process has ours
                continue
            self._pipes += 1
            self._selector.register(pipe, selectors.EVENT_READ, (_Source(target), pipe))
        self._read(outputs or {}, copies)

    def _read(self, outputs: Mapping[int, tuple[int, int]], copies: Path | None) -> None:
        for end, (rank, stream) in outputs.items():
            copy = None if copies is None else copies / f"{rank}.out"
            self._selector.register(end, selectors.EVENT_READ, (_Source(stream, label(rank), copy), None))

    def wake_on(self, descriptor: int) -> None:
        """Make `pump` return early when this descriptor becomes readable, and close it then."""
        self._selector.register(descriptor, selectors.EVENT_READ)

    def pump(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for output and pass it on; True if there was any."""
        OUTLET.pass_on()
        if not self._selector.get_map():
            time.sleep(timeout)
            return False
        ready = self._selector.select(timeout)
        said = False
        for key, _ in ready:
            if key.data is None:
                self._selector.unregister(key.fileobj)
                os.close(key.fd)
                continue
            said = True
            source, pipe = key.data
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            except OSError:  # a terminal whose last writer is gone
                data = b""
            self._pass_on(source, data)
            if not data:
                self._selector.unregister(key.fileobj)
                self._pipes -= pipe is not None
                _close(key.fd if pipe is None else pipe, source)
        now = time.monotonic()
        for key in self._selector.get_map().values():  # a prompt, a progress bar
            source = key.data[0] if key.data else None
            if source and source.held and now - source.since > PATIENCE:
                self._flush(source)
        return said

    def forget(self, name: bytes) -> None:
        """The rank with this label has ended, and its output has been read. The end of a pipe that
        it never opened, and of a terminal, cannot be seen."""
        for key in list(self._selector.get_map().values()):
            if key.data and key.data[0].name == name:
                self._flush(key.data[0])
                self._selector.unregister(key.fileobj)
                _close(key.fd, key.data[0])

    def drain(self, limit: float) -> None:
        """Pass on what is left, until the pipes are closed or `limit` seconds are over. Never
        raises OSError."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            try:
                if not self.pump(0.05) and not self._pipes:
                    break
            except OSError:
                pass  # our output has no reader; the pipes are to be emptied all the same
        for key in list(self._selector.get_map().values()):
            try:
                if key.data:
                    self._flush(key.data[0])
            except OSError:
                pass

    def end_line(self) -> None:
        """Before a message of our own on stderr: finish the line that a rank has begun there."""
        screens = self._screen.keys() if self._one_screen else (2,)
        if any(self._screen[screen] for screen in screens):
            self._screen |= dict.fromkeys(screens)
            try:
                OUTLET.write(2, b"\n")
            except OSError:
                pass  # it has no reader any more

    def _pass_on(self, source: _Source, data: bytes) -> None:
        if source.copy is not None:
            try:
                os.write(source.copy, data)
            except OSError:
                pass  # a full disk: the output is still shown
        if not source.held:
            source.since = time.monotonic()
        whole, newline, source.held = (source.held + data).rpartition(b"\n")
        lines = whole + newline
        self._write(source, lines if source.name else _NOISE.sub(b"", lines))
        if not data:
            self._flush(source)

    def _flush(self, source: _Source) -> None:
        data, source.held = source.held, b""
        if source.name and (half := _HALF_CONTROL.search(data)):
            data, source.held = data[: half.start()], half[0]
        source.since = time.monotonic()
        self._write(source, data)

    def _write(self, source: _Source, data: bytes) -> None:
        if not data:
            return
        screens = self._screen.keys() if self._one_screen else (source.target,)
        other = next((who for s in screens if (who := self._screen[s]) not in (None, source)), None)
        if source.name:
            if self._screen[source.target] is not source:
                source.at_beginning = True
            data = (b"\n" if other else b"") + _labelled(source, data)
        for s in screens:
            self._screen[s] = None
        self._screen[source.target] = None if data.endswith(b"\n") or not source.name else source
        OUTLET.write(source.target, data)


def _labelled(source: _Source, data: bytes) -> bytes:
    """With the label before the text of each line, also of a line that is redrawn."""
    first = _FIRST_WORD.match(data) if source.at_beginning else None
    name = source.name.replace(b"\\", rb"\\")
    rest = _NEXT_WORD.sub(rb"\g<0>" + name, data[first.end() :] if first else data)
    only_controls = source.at_beginning and not first
    source.at_beginning = only_controls or bool(_AT_BEGINNING.search(data))
    return data[: first.end()] + source.name + rest if first else rest


def _close(end: int | IO[bytes], source: _Source) -> None:
    if isinstance(end, int):
        rank_outputs.close(end)
    else:  # by its owner: it would close the number again later, when another file has it
        end.close()
    if source.copy is not None:
        os.close(source.copy)
