"""Where the ranks of a host meet under an mpirun that is not ours: a directory of this job and of nobody else.

Its name must be the same for all of them, so it can be guessed. What somebody else has put there is refused. A later
job never finds an earlier one's, because the name holds the launching process with the time of its start.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

from recover.world.liveness.board import start_time

MEMORY = Path("/dev/shm")


def make_meeting_place() -> Path:
    """Made by whichever rank comes first. Raises PermissionError if what is there is not ours alone."""
    job = re.sub(r"[^\w.-]", "-", os.environ.get("PMIX_NAMESPACE", "job"))
    launcher = _launcher()
    base = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    path = base / f"recover-{os.geteuid()}-{job}-{launcher}-{start_time(launcher)}"
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass  # another rank was faster, or somebody who should not have been
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{path} is not a directory that only this user can enter ({stat.filemode(found.st_mode)}, owner "
            f"{found.st_uid}): somebody else has put it there; remove it, and start again"
        )
    return path


def _launcher() -> int:
    """Who has started the ranks of this host: the nearest ancestor outside of the job. A rank's wrapper is inside."""
    mark = f"PMIX_NAMESPACE={os.environ.get('PMIX_NAMESPACE', 'job')}".encode()
    pid = os.getppid()
    while pid > 1 and mark in _read(f"/proc/{pid}/environ").split(b"\0"):
        pid = int(_read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1])
    return pid


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # somebody else's: a scheduler's daemon
        return b""
