"""Open MPI over several hosts, by a hostfile: ranks may die on any of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab_jobs import PROGRAMS, ROOT, LabJob
from patience import PATIENCE
from recover_lab.lab.hosts import Lab

from recover.launch.hostfile import check_hostfile
from recover.launch.preflight import Refusal

SHELL = PROGRAMS / "remote_shell.py"


@pytest.mark.guarantee(
    "Several hosts",
    "Ranks under Open MPI with a hostfile may die on any host, and the launcher says that hosts may not.",
)
@pytest.mark.usefixtures("a_lab_can_be_made_here")
def test_hostfile_rank_may_die_on_any_host(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("h1 slots=2\nh2 slots=2  # the other one\n")
    (tmp_path / "shell").write_text(f'#!/bin/sh\nexec {sys.executable} -S {SHELL} "$@"\n')
    (tmp_path / "shell").chmod(0o755)
    scenario = {"policy": "balanced", "samples": "exact", "accum": 2, "steps": 6, "carrier": "gloo"}
    with Lab(hosts=2, shared=[tmp_path]) as lab:
        for host in lab:
            server = host.start([sys.executable, "-S", SHELL, "serve"], stdout=subprocess.PIPE)
            assert server.stdout is not None
            assert server.stdout.readline() == b"up\n"
        command = [
            sys.executable,
            "-P",
            "-m",
            "recover.cli",
            "run",
            "-n",
            "4",
            "--hostfile",
            str(tmp_path / "hosts"),
        ]
        command += [
            "--run-dir",
            str(tmp_path / "run"),
            "--timeout",
            str(PATIENCE),
            "--kill",
            "2:3:vote",
            "--kill",
            "4:0:in-reduce",
        ]
        job = lab["h1"].start(
            [*command, str(PROGRAMS / "train.py"), json.dumps(scenario)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ
            | {"TMPDIR": "/tmp", "PYTHONPATH": str(ROOT), "PRTE_MCA_plm_ssh_agent": str(tmp_path / "shell")},
        )
        said, _ = job.communicate(timeout=PATIENCE)
        assert job.returncode == 0, said
        assert (
            "--hostfile is deprecated: ranks may die, but the loss of a host ends the job; use --nnodes"
            in said
        )
        assert "done on ranks 1-2" in said
        left = LabJob(lab, tmp_path, []).leftovers()
    commits = [
        note
        for line in (tmp_path / "run" / "diary-2.jsonl").read_text().splitlines()
        if (note := json.loads(line))["kind"] == "commit"
    ]
    assert [note["replicas"] for note in commits] == [[0, 1, 2, 3], *[[0, 1, 2]] * 2, *[[1, 2]] * 3]
    # (Torch's cache of a user belongs to no job.)
    ours = [line for lines in left.values() for line in lines if "torchinductor" not in line]
    assert all("remote_shell.py" in line for line in ours), left


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h1 slots=2\n", "has 2 slots, and there are to be 4 ranks"),
        ("h1 slot=4\n", "'h1 slot=4' is no host; write NAME slots=NUMBER"),
        (None, "cannot be read"),
    ],
)
def test_hostfile_that_does_not_fit_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "hosts").write_text(text)
    with pytest.raises(Refusal) as refusal:
        check_hostfile(tmp_path / "hosts", 4)
    assert words in str(refusal.value)
