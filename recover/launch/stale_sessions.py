"""Sessions that were left behind: every process of their job was killed, the guardian included.

What is left are directories in memory, with segments of Open MPI of many megabytes, and on disk. The
next job of the same user on this host removes them. A session is in use as long as its directory is
locked, by its guardian or its launcher, which may be in another container, or as long as a process of
its job lives. Process ids cannot decide that, because another container has its own. So a session
of an earlier version, which locked none, is left alone; it does not have the file that names its
scratch directory.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recover.job.output import say
from recover.launch import guardian

_NAME = re.compile(r"recover-\d+-[0-9a-f]{8}")


def remove_stale_sessions(places: Iterable[Path]) -> None:
    """Remove the sessions of this user in these directories that no process uses, and say so. Never raises."""
    for place in places:
        for session in sorted(place.glob("recover-*")):
            with suppress(OSError):  # another job may remove it meanwhile
                if _NAME.fullmatch(session.name) and _is_ours(session):
                    _remove_if_stale(session)


def _remove_if_stale(session: Path) -> None:
    with _locked(session) as is_free:
        is_locked_while_used = (session / guardian.SCRATCH).exists()
        if not is_free or not is_locked_while_used or guardian.members(str(session)):
            return
        size = sum(path.stat().st_size for path in session.rglob("*") if path.is_file())
        for directory in (_scratch_of(session), session):
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
    left = f"{session} ({size / 1e6:.1f} MB) was left by a job whose processes were all killed"
    if session.exists():
        say(f"{left}, and cannot be removed; check its permissions, and remove it")
    else:
        say(f"{left}; removed it")


@contextmanager
def _locked(session: Path) -> Iterator[bool]:
    """Whether no other process holds the lock of this session."""
    descriptor = os.open(session, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = session.exists()  # another job may have removed it meanwhile
    except OSError:
        is_free = False
    try:
        yield is_free
    finally:
        os.close(descriptor)


def _scratch_of(session: Path) -> Path | None:
    try:
        scratch = Path((session / guardian.SCRATCH).read_text())
    except OSError:
        return None
    return scratch if scratch.name == f"{session.name}-tmp" and _is_ours(scratch) else None


def _is_ours(directory: Path) -> bool:
    """Whether it is a directory, not a link to one, of this user."""
    try:
        found = os.lstat(directory)
    except OSError:
        return False
    return os.path.isdir(directory) and not os.path.islink(directory) and found.st_uid == os.geteuid()
