"""The process that owns a job (its launcher, or the agent of a host), as a record names it, and
whether it still runs.

A pid alone says little: pids are used again, are different in every container, and say nothing on
another machine or after a restart of the machine. So a record also has the time at which the
process began, the namespace of the pid, and the boot of the machine.
"""

from __future__ import annotations

import enum
import fcntl
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_BOOT, _MACHINE = "/proc/sys/kernel/random/boot_id", "/etc/machine-id"
_STATE, _BORN = 0, 19  # fields of /proc/PID/stat after the name
_ENDED = "ZX"  # a zombie has ended, and waits for its parent


class Fate(enum.Enum):
    ALIVE = enum.auto()
    GONE = enum.auto()  # this machine has run ever since, and the process is not there
    RESTARTED = enum.auto()  # the machine was restarted
    UNKNOWN = enum.auto()  # it is a process of another machine


def describe_this_process() -> dict[str, Any]:
    """A description of this process, for a record."""
    pid = os.getpid()
    return {
        "pid": pid,
        "born": (_stat(pid) or (0, 0))[1],
        "namespace": _namespace(),
        "boot": _read(_BOOT),
        "machine": _machine(),
    }


def fate(owner: Mapping[str, Any], run_dir: Path) -> Fate:
    """State of the process that owns a run, as seen from this machine. `run_dir`: the directory that
    the process locks while it runs, if the file system has locks."""
    if owner.get("boot") != _read(_BOOT):
        return Fate.RESTARTED if owner.get("machine") == _machine() else Fate.UNKNOWN
    if owner.get("namespace") != _namespace():  # in another container of this machine
        return _by_lock(run_dir)
    if (found := _stat(owner["pid"])) is not None:
        state, born = found
        return Fate.ALIVE if born == owner["born"] and state not in _ENDED else Fate.GONE
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return Fate.GONE
    except OSError:
        pass
    return _by_lock(run_dir)  # another user's process, in a /proc that hides those


def is_locked(run_dir: Path) -> bool | None:
    """Whether a process of this machine holds the lock of a run directory; None if that cannot be
    known."""
    try:
        descriptor = os.open(run_dir, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    else:
        return False
    finally:
        os.close(descriptor)


def _by_lock(run_dir: Path) -> Fate:
    return {True: Fate.ALIVE, False: Fate.GONE, None: Fate.UNKNOWN}[is_locked(run_dir)]


def _stat(pid: int) -> tuple[str, int] | None:
    """State of a process, and when it began, in clock ticks after the boot."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[_STATE], int(fields[_BORN])
    except (OSError, ValueError, IndexError):
        return None


def _namespace() -> int:
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def _machine() -> str:
    return f"{socket.gethostname()} {_read(_MACHINE)}".strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
