"""What a job runs and under which limits: the same for one host under mpirun and for several hosts
on etcd."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from recover.job.spec import Monitors
from recover.launch import preflight

DEFAULT_TIMEOUT = 1800.0


@dataclass(frozen=True)
class LaunchRequest:
    """`hang_limit`, `link_timeout` and `faults` that are None are read from the environment."""

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

    @property
    def command(self) -> list[str]:
        """Arguments of `recover.launch.bootstrap`."""
        named = ["-m", str(self.script)] if self.module else [str(self.script.absolute())]
        return [*named, *self.args]

    def check_script(self) -> None:
        """Raises Refusal if there is nothing to run."""
        preflight.check_module(str(self.script)) if self.module else preflight.check_script(self.script)
