"""The command of a job and its limits: the same for one host under mpirun and for several hosts
on etcd."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from recover.job.record_files import FILES
from recover.job.spec import Monitors
from recover.job.stop_request import StopRequest
from recover.launch import preflight
from recover.launch.signals import JobSignals
from recover.runs.records.job_state import last_step

DEFAULT_TIMEOUT = 1800.0


@dataclass(frozen=True)
class LaunchRequest:
    """The script or module of a job, and its limits. `hang_limit`, `link_timeout` and `faults` that are None
    are read from the environment."""

    script: Path  # or the name of a module, with `module`
    args: Sequence[str] = ()
    replica_size: int = 1
    run_dir: Path | None = None
    timeout: float = DEFAULT_TIMEOUT  # seconds without progress after which the job is ended; 0: never
    hang_limit: float | None = None
    link_timeout: float | None = None
    carrier: str = "auto"
    faults: Sequence[str] | None = None
    module: bool = False
    # A user's script: its output is labelled by rank, its steps are recorded, losses are reported
    # while it runs, and a single rank gets our terminal.
    is_user_script: bool = False
    monitors: Monitors = nullcontext  # entered, with the run directory, while the job runs
    signals: JobSignals | None = None  # of a caller that handles them; None: the launcher does
    stop_file: Path | None = None  # a script that heeds requests to stop also looks for this file
    replay: str = ""  # what is asked of a user's script that is replayed (`recover.job.script_replay`)
    way_on: Callable[[Path], str] = lambda run_dir: ""  # how a job goes on that a signal has ended

    @property
    def command(self) -> list[str]:
        """Arguments of `recover.launch.bootstrap`."""
        named = ["-m", str(self.script)] if self.module else [str(self.script.absolute())]
        return [*named, *self.args]

    def ask_to_stop(self, session: Path) -> str:
        """Ask the ranks of this host to stop after their step. Returns what they do now; "" if they
        heed no request. A signal handler may call it."""
        stop = StopRequest(session)
        if self.stop_file is None and not stop.is_heeded:
            return ""
        stop.ask()
        if self.stop_file is None:
            return "the script is asked to stop after its step (step.stop_agreed)"
        # For ranks on hosts that share it. On a thread: the file system may hang, and a signal
        # handler must not.
        threading.Thread(
            target=FILES.replace, args=[self.stop_file, b""], name="recover-stop", daemon=True
        ).start()
        return "finishing the step and saving a checkpoint"

    def describe_end(self, run_dir: Path) -> str:
        """Say after which step a job has ended, and how it goes on."""
        step, way_on = last_step(run_dir), self.way_on(run_dir)
        return (f" after step {step}" if step else " before its first step") + (
            f"; {way_on}" if way_on else ""
        )

    def check_script(self) -> None:
        """Raise Refusal if there is nothing to run."""
        preflight.check_module(str(self.script)) if self.module else preflight.check_script(self.script)
