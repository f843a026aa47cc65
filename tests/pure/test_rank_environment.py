"""One builder makes the environment of ranks, under mpirun and when they are started directly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recover.job import process
from recover.job.spec import VARIABLE, JobSpec
from recover.launch.rank_environment import job_environment, rank_variables

SPEC = JobSpec(4, run_dir="/runs/one")


def test_job_environment_names_the_job_and_drops_an_outer_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that inherits the rank of an outer launcher would take itself for another one."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "7")
    monkeypatch.setenv(process.RANK, "7")
    monkeypatch.setenv(VARIABLE, "/dev/shm/outer/job.json")
    monkeypatch.setenv("MY_SETTING", "kept")
    made = job_environment(SPEC, Path("/dev/shm/s/job.json"), Path("/tmp/s"), 4)
    assert made[VARIABLE] == "/dev/shm/s/job.json"
    assert made["MY_SETTING"] == "kept"
    assert (made["RECOVER_RUN_DIR"], made["TMPDIR"]) == ("/runs/one", "/tmp/s")
    assert not {"OMPI_COMM_WORLD_RANK", process.RANK} & made.keys()
    mine = made | rank_variables(2, 1, 4)
    assert [mine[name] for name in (process.RANK, process.RANK_ON_HOST, process.RANKS_ON_HOST)] == [
        *("2", "1", "4")
    ]


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def threads(ranks: int) -> str:
        return job_environment(SPEC, Path("job.json"), Path("/tmp"), ranks)["OMP_NUM_THREADS"]

    assert [threads(ranks) for ranks in (1, 3, 8, 9)] == ["8", "2", "1", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads(8) == "5"
