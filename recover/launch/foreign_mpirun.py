"""The directory that the ranks of a host share under an mpirun that was not started by our
launcher.

Its name must be the same for all of them, so it can be guessed: a directory that another user made
is refused. The name holds the launching process and the time of its start, so a later job never
finds the directory of an earlier one.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

from recover.world.liveness.board import start_time

MEMORY = Path("/dev/shm")


def make_shared_directory() -> Path:
    """Make the directory, unless another rank has made it. Raises PermissionError if another user
    made it, or can enter it."""
    job = re.sub(r"[^\w.-]", "-", os.environ.get("PMIX_NAMESPACE", "job"))
    launcher = _launcher()
    base = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    path = base / f"recover-{os.geteuid()}-{job}-{launcher}-{start_time(launcher)}"
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass  # another rank was faster, or another user: see below
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{path} is not a directory that only this user can enter ({stat.filemode(found.st_mode)}, owner "
            f"{found.st_uid}): another user made it; remove it, and start again"
        )
    return path


def _launcher() -> int:
    """The process that has started the ranks of this host: the nearest ancestor that is not part of
    the job."""
    mark = f"PMIX_NAMESPACE={os.environ.get('PMIX_NAMESPACE', 'job')}".encode()
    pid = os.getppid()
    while pid > 1 and mark in _read(f"/proc/{pid}/environ").split(b"\0"):
        pid = int(_read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1])
    return pid


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # another user's: a scheduler's daemon
        return b""
