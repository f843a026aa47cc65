"""Processes of a host that wait to become ranks, so that a lost replica restarts sooner: see
`prewarmed_process`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from recover.job.environment import changed

PYTHON = (sys.executable, "-P", "-m")


class PrewarmedProcesses:
    """Keeps prewarmed processes for a host. `most`: how many are kept. One thread starts and uses
    all of them; they end with it (PR_SET_PDEATHSIG)."""

    def __init__(
        self, most: int, command: Sequence[str], environment: Mapping[str, str], session: Path
    ) -> None:
        self._most, self._command, self._session = most, command, session
        self._environment = environment  # it names the job file, so the guardian finds them
        self._waiting: list[subprocess.Popen[bytes]] = []

    def fill(self) -> None:
        """Start a missing process, once the first ranks have left their changes of the environment."""
        if len(self._waiting) < self._most and (environment := changed(self._environment, self._session)):
            self._waiting.append(
                start("recover.launch.prewarmed_process", self._command, environment, subprocess.PIPE)
            )

    def take(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Make one of them a rank, with this environment; None if there is none."""
        while self._waiting:
            process = self._waiting.pop(0)
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(dict(environment)).encode() + b"\n")
                process.stdin.close()
                process.stdin = None  # as with any rank
                if process.poll() is None:
                    return process
            except OSError:
                pass  # it has ended
            _end(process)
        return None

    def end(self) -> None:
        while self._waiting:
            _end(self._waiting.pop())


def start(
    module: str, command: Sequence[str], environment: Mapping[str, str], stdin: int
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*PYTHON, module, *command],
        env=environment,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,  # Ctrl-C comes to us, and we end the job
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
