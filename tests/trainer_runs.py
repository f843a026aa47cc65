"""Runs of other projects' trainers, alone and on ReCoVer; shared by titan_runs, hf_runs and pl_runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patience import PATIENCE


@dataclass
class TrainerRun:
    """A run that has ended; `out` is the directory of its files."""

    code: int
    output: str
    out: Path


def launch_command(
    ranks: int, run_dir: Path, options: Sequence[str] = (), kills: Sequence[str] = ()
) -> list[str]:
    """`recover run`, to be followed by the script and its arguments."""
    command = [sys.executable, "-m", "recover.cli", "run", "-n", str(ranks), "--page", "off"]
    command += ["--run-dir", str(run_dir), "--timeout", str(PATIENCE), *options]
    for kill in kills:
        command += ["--kill", kill]
    return command


def clean_environment(**more: str) -> dict[str, str]:
    """The variables of this process without those of ReCoVer, with one thread for each rank."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RECOVER_")}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def run_to_end(command: Sequence[str], environment: Mapping[str, str], directory: Path) -> tuple[int, str]:
    """Exit code and output."""
    result = subprocess.run(
        command,
        env=environment,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    return result.returncode, result.stdout
