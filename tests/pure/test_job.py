"""What a job is told reaches every rank whole, and only that way."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from recover.job.spec import JobSpec
from recover.launch.preflight import Refusal, check_carrier, check_faults

ROOT = Path(__file__).parents[2]


def test_a_job_is_read_as_it_was_written_and_by_its_owner_alone(tmp_path: Path) -> None:
    job = JobSpec(
        6, 2, "gloo", 2.5, ("3:1.0:vote",), run_dir="/runs/x", session=str(tmp_path), token="secret"
    )
    path = job.write()
    assert JobSpec.read(path) == job
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        job.write()


def test_a_job_of_another_version_is_refused(tmp_path: Path) -> None:
    path = JobSpec(1, session=str(tmp_path)).write()
    path.write_text(path.read_text().replace('"token"', '"colour"'))
    with pytest.raises(ValueError, match="colour, which this version of recover does not know"):
        JobSpec.read(path)


def test_a_foreign_launcher_tells_by_a_few_variables() -> None:
    told = {"OMPI_COMM_WORLD_SIZE": "4", "RECOVER_REPLICA_SIZE": "2", "RECOVER_KILL": "3:1:vote 4:0:update"}
    assert JobSpec.from_environment(told) == JobSpec(4, 2, faults=("3:1:vote", "4:0:update"))
    with pytest.raises(ValueError, match="RECOVER_REPLICA_SIZE is 'two'"):
        JobSpec.from_environment(told | {"RECOVER_REPLICA_SIZE": "two"})
    with pytest.raises(ValueError, match="hang limit is 'soon'"):
        JobSpec.from_environment(told | {"RECOVER_HANG_LIMIT": "soon"})


def test_a_fault_that_can_never_strike_is_refused_before_anything_starts() -> None:
    assert check_faults(["3:1.1:vote"], 4, 2) == ("3:1.1:vote",)
    with pytest.raises(Refusal, match=r"--kill: 3:2\.0:vote can never strike: there are 2 replicas of 2"):
        check_faults(["3:2:vote"], 4, 2)
    with pytest.raises(Refusal, match="did you mean 'vote'"):
        check_faults(["3:1:votes"], 4, 2)
    with pytest.raises(Refusal, match="it must be one of auto, mpi, gloo"):
        check_carrier("pigeon")


def test_nobody_but_the_job_reads_our_variables() -> None:
    """Ten modules once parsed the environment, each in its own way."""
    allowed = {"job/spec.py", "launch/preflight.py", "launch/doctor_probe.py", "data/cache.py"}
    reads = re.compile(r"environ(\.get\(|\[)\s*f?[\"']RECOVER_")
    found = {
        str(path.relative_to(ROOT / "recover"))
        for path in (ROOT / "recover").rglob("*.py")
        if reads.search(path.read_text()) and path.parent.name != "programs"  # scripts, as users write them
    }
    assert found <= allowed
