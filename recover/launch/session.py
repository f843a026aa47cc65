"""A job's session: its two directories and the guardian that removes them, seen from the launcher."""

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

MEMORY = Path("/dev/shm")


class Session:
    """`directory` lies in memory: the board and Open MPI's segments. `scratch` is the job's TMPDIR, on disk:
    Open MPI's own session and whatever a killed rank leaves in a temporary directory."""

    def __init__(self) -> None:
        name = f"recover-{os.getpid()}-{secrets.token_hex(4)}"
        temporary = Path(tempfile.gettempdir()).absolute()
        self.directory = (MEMORY if os.access(MEMORY, os.W_OK) else temporary) / name
        self.scratch = temporary / f"{name}-tmp"
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, self.directory, self.scratch],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env={key: value for key, value in os.environ.items() if key != VARIABLE},
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )

    def __enter__(self) -> Self:
        """Wait until the directories are there."""
        assert self._guardian.stdout is not None
        if not self._guardian.stdout.readline():
            raise Refusal(f"cannot make {self.directory} and {self.scratch}; is there room?")
        return self

    def end(self) -> None:
        """Have everything of this job killed and removed; returns at once, also inside a signal handler."""
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()

    def __exit__(self, *_: object) -> None:
        """Return when nothing is left."""
        self.end()
        session = str(self.directory)
        if self._guardian.wait() != 0 or guardian.members(session) or self.directory.exists():
            # Somebody killed it; or a signal came while mpirun was being started, and it was done too early; or an etcd
            # of this host, which others still needed, wrote to its data while they were removed.
            guardian.clean(session, [session, str(self.scratch)])
