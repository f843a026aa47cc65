"""Words for whoever looks at our output, who may have stopped to read it: a pager, a terminal after
Ctrl-S.

They are said by the threads that watch a job. If one of them waited for a reader, nobody would hear
of the next death, and all ranks would wait for the dead one. So what cannot be written now is kept,
and written later.
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
_AT_ONCE = 4096  # bytes: so many a pipe that takes any takes without waiting
_READY = select.POLLOUT | select.POLLERR | select.POLLHUP | select.POLLNVAL  # whose write ends, well or not
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FOR_ROOM = 300.0  # seconds that the end waits for room, where the output goes to a file
Put = Callable[[bytes], int]


class Outlet:
    """What is written to it comes out in this order."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, Put, bytes]] = deque()
        self._bytes = self._left_out = 0
        self._lock = threading.RLock()
        self._is_full = False  # it is a file, and its disk has no room
        self.patience: float | None = (
            None  # seconds without a reader after which `finish` gives up; None: never
        )

    def write(self, descriptor: int, data: bytes, put: Put | None = None) -> None:
        """`put`: how it is written, if not just so; `descriptor` says when it can be."""
        write = put or (lambda piece: os.write(descriptor, piece))
        with self._lock:
            self._kept.append((descriptor, write, data))
            self._bytes += len(data)
            self.pass_on()
            while self._bytes > MOST:
                size = len(self._kept.popleft()[2])
                self._bytes, self._left_out = self._bytes - size, self._left_out + size

    def pass_on(self) -> bool:
        """Write what can be written without waiting, or without room. Whether that was all. Raises
        OSError if nobody can read it."""
        with self._lock:
            while self._kept:
                descriptor, put, data = self._kept[0]
                if not _takes_more(descriptor):
                    return False
                try:
                    if self._left_out:
                        put(f"[{self._left_out} bytes that nobody has read are left out]\n".encode())
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
        """All is over, and nothing is held up any more: whoever reads may take his time, or be
        gone."""
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
    """On stderr, for people. Never raises: whoever watches a job has more to do than to talk about
    it."""
    stream = sys.stderr
    data = f"recover: {text}\n".encode(errors="replace")
    try:
        OUTLET.write(_descriptor(stream), data, lambda piece: _put(stream, piece))
    except (OSError, ValueError):
        pass  # nobody reads there any more


def _put(stream: TextIO, data: bytes) -> int:
    """Past the stream's buffer where there is a file below it: what a full disk refuses would stay
    in that buffer, and come out twice."""
    stream.flush()
    if (descriptor := _descriptor(stream)) >= 0:
        return os.write(descriptor, data)
    stream.buffer.write(data)
    stream.buffer.flush()
    return len(data)


def _descriptor(stream: TextIO) -> int:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # it is no file, and takes everything
        return -1


def _takes_more(descriptor: int) -> bool:
    if descriptor < 0:
        return True
    poll = select.poll()
    poll.register(descriptor, _READY)
    return bool(poll.poll(0))
