"""Helpers of the launcher's tests: real jobs, each with a temporary directory of its own, and what they leave."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from patience import PATIENCE

from recover.runs.live.view import RunView

ULFM = """
import os, signal, sys, threading, time
import mpi4py
mpi4py.rc.finalize = False
from mpi4py import MPI

world = MPI.COMM_WORLD
world.Set_errhandler(MPI.ERRORS_RETURN)
rank = world.rank

def wait_for_deaths(number):
    while world.Get_failed().Get_size() < number:
        try:
            world.Agree(1)
        except MPI.Exception:
            world.Ack_failed()
"""

# The smallest script of a user: a model and its step; what the script does with them follows.
OWN_STEP = """
import os, time
import torch
import recover

class Data:
    def __len__(self): return 10**6
    def __getitem__(self, i): return torch.ones(1, 2) * (i % 5)

world = recover.init()
model = torch.nn.Linear(2, 1)
step = recover.Step(world, model, torch.optim.SGD(model.parameters(), lr=0.001), global_batch=6)
"""


class Job:
    """A `recover run` in its own process; `text` is the script, written to `place`."""

    def __init__(self, place: Path, text: str, *options: str, args: tuple[str, ...] = ()) -> None:
        place.mkdir(exist_ok=True)
        self.run_dir, self.tmp, script = place / "run", place / "tmp", place / "script.py"
        self.tmp.mkdir(exist_ok=True)
        script.write_text(textwrap.dedent(text))
        command = [sys.executable, "-P", "-m", "recover.cli", "run", "--run-dir", str(self.run_dir)]
        self.process = subprocess.Popen(
            [*command, "--timeout", str(PATIENCE), *options, str(script), *args],
            env=os.environ | {"TMPDIR": str(self.tmp)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a process group such as a terminal makes: Ctrl-C can be sent to all of it
        )
        self.stdout = self.stderr = ""

    def finish(self) -> int:
        """Wait for the end. Returns the exit code; `stdout` and `stderr` then have the whole output of the job.

        `stderr` leaves out messages about removed sessions of other jobs: a test that kills a whole job may run at the
        same time.
        """
        said, errors = self.process.communicate(timeout=2 * PATIENCE)
        self.stderr = re.sub(
            r"^recover: /\S+ \(\S+ MB\) was left by a job .*\n", "", errors, flags=re.MULTILINE
        )
        self.stdout = re.sub(
            r"^\[rank \d+\] ", "", said, flags=re.MULTILINE
        )  # few tests need the labels of ranks
        return self.process.returncode

    def rank_file(self, name: str) -> Path:
        return self.run_dir / "ranks" / name

    def session(self) -> Path | None:
        return next(Path("/dev/shm").glob(f"recover-{self.process.pid}-*"), None)

    def processes(self) -> dict[int, str]:
        """Every process that carries this job's session, with its command line."""
        mark = f"RECOVER_JOB=/dev/shm/recover-{self.process.pid}-".encode()
        return {pid: line for pid, line, environment in _processes() if mark in environment}

    def guardian(self) -> int:
        return next(
            pid
            for pid, line, _ in _processes()
            if "guardian" in line and f"recover-{self.process.pid}-" in line
        )

    def leftovers(self) -> list[str]:
        """Processes, shared memory and temporary files of this job."""
        files = [*Path("/dev/shm").glob(f"recover-{self.process.pid}-*"), *self.tmp.iterdir()]
        return [*map(str, files), *self.processes().values()]


def state_of(run_dir: Path) -> str:
    """State of the job of a run, in the words of `recover status`."""
    view = RunView(run_dir)
    view.refresh()
    return view.job().text


def _processes() -> Iterator[tuple[int, str, bytes]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield int(entry.name), line, (entry / "environ").read_bytes()
            except OSError:
                pass  # gone meanwhile
