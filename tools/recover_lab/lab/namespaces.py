"""Run a function inside other namespaces: a new thread enters them, runs it, and ends.

Namespaces belong to threads. A process that such a thread starts stays where the thread was, and is still an ordinary
child of ours: its pid, its exit code and its pipes are as with any other.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MOUNT, UTS, IPC, PID, NET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000  # of <sched.h>
WHOLE_HOST = MOUNT | UTS | IPC | PID | NET
_OWN_DIRECTORY = (
    0x200  # CLONE_FS: a thread that shares its working directory with others may not change its mounts
)

_libc = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")


def in_new(kinds: int, action: Callable[[], T]) -> T:
    """Run `action` in new namespaces of these kinds. The first process of a new PID namespace is its init."""
    return _elsewhere(lambda: _libc.unshare(kinds), action)


def in_those_of(pidfd: int, kinds: int, action: Callable[[], T]) -> T:
    """Run `action` in the namespaces of a living process."""
    if not kinds & MOUNT:
        return _elsewhere(lambda: _libc.setns(pidfd, kinds), action)
    return _elsewhere(lambda: _libc.unshare(_OWN_DIRECTORY) or _libc.setns(pidfd, kinds), action)


def _elsewhere(go: Callable[[], int], action: Callable[[], T]) -> T:
    def gone() -> T:
        if go() != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"the kernel refuses to enter a namespace: {os.strerror(error)}")
        return action()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(gone).result()
