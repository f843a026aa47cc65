"""The session of a job on this host: its two directories, and the guardian that removes them."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

from recover.job.spec import VARIABLE
from recover.launch import guardian
from recover.launch.preflight import Refusal
from recover.launch.stale_sessions import remove_stale_sessions

MEMORY = Path("/dev/shm")


class Session:
    """The directories of a job on this host. `directory` is in memory: the job file, the board,
    Open MPI's segments. `scratch` is the TMPDIR of the job, on disk: Open MPI's own session, and
    files that a killed rank leaves in a temporary directory."""

    def __init__(self, address: Path | None = None) -> None:
        """`address`: the file with the address of the job's page, which goes with the session."""
        name = f"recover-{os.getpid()}-{secrets.token_hex(4)}"
        self._lock = -1
        temporary = Path(tempfile.gettempdir()).absolute()
        self.directory = (MEMORY if os.access(MEMORY, os.W_OK) else temporary) / name
        self.scratch = temporary / f"{name}-tmp"
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, self.directory, self.scratch, str(address or "")],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env={key: value for key, value in os.environ.items() if key != VARIABLE},
            start_new_session=True,  # Ctrl-C in the terminal must not end it
        )

    def __enter__(self) -> Self:
        """Return when the directories exist."""
        assert self._guardian.stdout is not None
        if not self._guardian.stdout.readline():
            raise Refusal(f"cannot make {self.directory} and {self.scratch}; is there room?")
        self._lock = guardian.hold(str(self.directory))  # the guardian may be killed, and the job goes on
        remove_stale_sessions({MEMORY, self.directory.parent})
        return self

    def end(self) -> None:
        """Have all processes of the job killed, and its directories removed. Does not wait; for
        signal handlers, too."""
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()

    def __exit__(self, *_: object) -> None:
        """Return when no process and no directory of the job is left."""
        self.end()
        session = str(self.directory)
        if self._guardian.wait() != 0 or guardian.members(session) or self.directory.exists():
            # The guardian was killed; or a signal came while mpirun was being started, after the
            # guardian had looked; or an etcd of this host, which other hosts still needed, wrote
            # files while its directory was removed.
            guardian.clean(session, [session, str(self.scratch)])
        if self._lock >= 0:
            os.close(self._lock)
