"""How tests wait: for an event, and no longer than a hang guard that a busy machine never reaches.

No test asserts how long something took, and none sleeps until something has probably happened.
What a test leaves in its own process is compared by identity: other tests' descriptors and threads come and go.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

PATIENCE = 300.0  # seconds; many times what anything takes on two cores with other load


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    """Wait until the condition holds; whether it did. `seconds`: given only by a test of what must not happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def open_files() -> set[tuple[str, str]]:
    """The descriptors of this process, each with the file, socket or pipe behind it."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:
            pass  # closed meanwhile; the listing's own is among them
    return found


class LeavesNothing:
    """Files and threads that are opened inside the `with` are closed after it, or soon afterwards."""

    def __enter__(self) -> None:
        self._files, self._threads = open_files(), set(threading.enumerate())

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            assert wait_until(lambda: not self.left(), 20), self.left()

    def left(self) -> list[object]:
        return [*(open_files() - self._files), *(set(threading.enumerate()) - self._threads)]
