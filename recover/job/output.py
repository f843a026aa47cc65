"""Output that never blocks: its reader may have stopped to read (a pager, a terminal after Ctrl-S).

Threads that watch a job write messages and pass on the output of ranks. If one of them waited for a
reader, it would not declare the next death, and all ranks would wait. So output that cannot be
written now is kept, and written later.
"""

from __future__ import annotations

import atexit
import errno
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

MOST = 1 << 22  # bytes that are kept for a reader; of more the oldest are left out
_AGAIN = 0.02  # seconds between two tries at the end
_AT_ONCE = 4096  # bytes that a pipe with room for any takes without blocking
_READY = select.POLLOUT | select.POLLERR | select.POLLHUP | select.POLLNVAL  # whose write ends, well or not
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FOR_ROOM = 300.0  # seconds that the end waits for room, where the output goes to a file
Put = Callable[[bytes], int]


class Outlet:
    """Writes in the order of the calls."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, Put, bytes]] = deque()
        self._bytes = self._left_out = 0
        self._lock = threading.RLock()
        self._is_full = False  # it is a file, and its disk has no room
        self.patience: float | None = (
            None  # seconds without a reader after which `finish` gives up; None: never
        )

    def write(self, descriptor: int, data: bytes, put: Put | None = None) -> None:
        """Write data, or keep them until their reader takes them. `put`: a function that writes, in
        place of os.write; `descriptor` tells when it can be called."""
        write = put or (lambda piece: os.write(descriptor, piece))
        with self._lock:
            self._kept.append((descriptor, write, data))
            self._bytes += len(data)
            self.pass_on()
            while self._bytes > MOST:
                size = len(self._kept.popleft()[2])
                self._bytes, self._left_out = self._bytes - size, self._left_out + size

    def pass_on(self) -> bool:
        """Write as much as possible without blocking. Returns whether that was all. Raises OSError
        if the reader has gone."""
        with self._lock:
            while self._kept:
                descriptor, put, data = self._kept[0]
                if not _takes_more(descriptor):
                    return False
                try:
                    if self._left_out:
                        put(f"[{self._left_out} unread bytes were dropped]\n".encode())
                        self._left_out = 0
                        continue
                    size = put(data[:_AT_ONCE])
                except OSError as error:
                    if error.errno in _FULL:
                        self._is_full = True
                        return False
                    self._kept.clear()
                    self._bytes = 0
                    raise
                self._is_full = False
                self._bytes -= size
                if size < len(data):
                    self._kept[0] = descriptor, put, data[size:]
                else:
                    self._kept.popleft()
            return True

    def finish(self) -> None:
        """At the end of the process: wait for the reader, which may take time, or be gone."""
        left, since = self._bytes, time.monotonic()
        while not self._passed_on():
            if self._bytes != left:
                left, since = self._bytes, time.monotonic()
            patience = _FOR_ROOM if self.patience is None and self._is_full else self.patience
            if patience is not None and time.monotonic() - since > patience:
                return
            time.sleep(_AGAIN)

    def _passed_on(self) -> bool:
        try:
            return self.pass_on()
        except OSError:
            return True


OUTLET = Outlet()
atexit.register(OUTLET.finish)


def say(text: str) -> None:
    """Write a message to stderr. Never raises: a thread that watches a job must go on."""
    stream = sys.stderr
    data = f"recover: {text}\n".encode(errors="replace")
    try:
        OUTLET.write(_descriptor(stream), data, lambda piece: _put(stream, piece))
    except (OSError, ValueError):
        pass  # the reader has gone


def _put(stream: TextIO, data: bytes) -> int:
    """Write past the buffer of the stream, if there is a file below it: data that a full disk
    refuses would stay in the buffer, and be written twice."""
    stream.flush()
    if (descriptor := _descriptor(stream)) >= 0:
        return os.write(descriptor, data)
    stream.buffer.write(data)
    stream.buffer.flush()
    return len(data)


def _descriptor(stream: TextIO) -> int:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # it is no file, and never blocks
        return -1


def _takes_more(descriptor: int) -> bool:
    if descriptor < 0:
        return True
    poll = select.poll()
    poll.register(descriptor, _READY)
    return bool(poll.poll(0))
