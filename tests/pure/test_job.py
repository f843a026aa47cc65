"""The specification of a job reaches every rank whole, and only by its file."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recover import __version__
from recover.cli import app
from recover.job import process
from recover.job.spec import JobSpec
from recover.launch import init
from recover.launch.preflight import Refusal, check_carrier, check_faults

ROOT = Path(__file__).parents[2]


def test_job_file_survives_serialization_and_is_private_to_its_owner(tmp_path: Path) -> None:
    job = JobSpec(
        6, 2, "gloo", 2.5, ("3:1.0:vote",), run_dir="/runs/x", session=str(tmp_path), token="secret"
    )
    path = job.write()
    assert JobSpec.read(path) == job
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        job.write()


def test_job_of_another_version_is_refused(tmp_path: Path) -> None:
    path = JobSpec(1, session=str(tmp_path)).write()
    path.write_text(path.read_text().replace('"token"', '"colour"'))
    with pytest.raises(ValueError, match="colour, which this version of recover does not know"):
        JobSpec.read(path)


def test_foreign_launcher_is_recognised_by_its_variables() -> None:
    told = {"OMPI_COMM_WORLD_SIZE": "4", "RECOVER_REPLICA_SIZE": "2", "RECOVER_KILL": "3:1:vote 4:0:update"}
    assert JobSpec.from_environment(told) == JobSpec(4, 2, faults=("3:1:vote", "4:0:update"))
    with pytest.raises(ValueError, match="RECOVER_REPLICA_SIZE is 'two'"):
        JobSpec.from_environment(told | {"RECOVER_REPLICA_SIZE": "two"})
    with pytest.raises(ValueError, match="hang limit is 'soon'"):
        JobSpec.from_environment(told | {"RECOVER_HANG_LIMIT": "soon"})


def test_fault_that_can_never_strike_is_refused_before_the_start() -> None:
    assert check_faults(["3:1.1:vote"], 4, 2) == ("3:1.1:vote",)
    with pytest.raises(Refusal, match=r"--kill: 3:2\.0:vote can never strike: there are 2 replicas of 2"):
        check_faults(["3:2:vote"], 4, 2)
    with pytest.raises(Refusal, match="did you mean 'vote'"):
        check_faults(["3:1:votes"], 4, 2)
    with pytest.raises(Refusal, match="it must be one of auto, mpi, gloo"):
        check_carrier("pigeon")


def test_fault_that_could_strike_no_rank_is_refused_with_the_reason() -> None:
    for texts, words in (
        (["3:1:repair"], "there is no repair unless another replica is lost in step 3"),
        (["3:0:extra=pause:1"], "there is no extra unless"),
        (["2:1:vote", "5:1:forward"], r"replica 1 is lost already by 2:1\.0:vote"),
    ):
        with pytest.raises(Refusal, match=f"--kill: fault .*{words}"):
            check_faults(texts, 3, 1)
    assert check_faults(["2:1:vote", "2:0:repair"], 3, 1)


@pytest.mark.guarantee(
    "User code",
    "`python train.py` is a world of one without launcher and MPI, and is refused under a foreign launcher.",
)
@pytest.mark.parametrize(
    ("name", "launcher"),
    [("WORLD_SIZE", "torchrun"), ("SLURM_STEP_NUM_TASKS", "srun"), ("PMI_SIZE", "another MPI")],
)
def test_process_of_a_foreign_launcher_is_no_world_of_one(
    monkeypatch: pytest.MonkeyPatch, name: str, launcher: str
) -> None:
    monkeypatch.setenv(name, "1")
    assert init._lone_job().ranks == 1
    monkeypatch.setenv(name, "4")
    with pytest.raises(
        RuntimeError, match=f"{name} is 4.*{launcher}.*`recover run -n 4 SCRIPT`.*unset {name}"
    ):
        init._lone_job()


def test_fault_of_another_replica_is_refused_in_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECOVER_KILL", "3:1:vote")
    monkeypatch.setattr(init, "_current", None)
    with pytest.raises(ValueError, match=r"fault 3:1\.0:vote: there are replicas 0 to 0, and no 1"):
        init._alone(init._lone_job())


def test_open_mpi_variables_are_hidden_from_user_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_hidden", {})
    given = {
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "PMIX_RANK": "2",
        "OMPI_MCA_pml": "ob1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    process.hide_mpi_variables()
    assert [name for name in given if name in os.environ] == ["OMPI_MCA_pml"]
    assert (process.rank(), process.ranks_on_host(), process.on_one_host()) == (2, 4, False)


@pytest.mark.guarantee(
    "User code",
    "Every rank has `LOCAL_RANK`, its index on its host, under every launcher and after a restart.",
)
def test_local_rank_is_the_index_of_the_rank_on_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is right under Open MPI, after its variables are hidden, and under an agent; the value of the
    launcher's environment is replaced."""
    monkeypatch.setattr(process, "_hidden", {})
    monkeypatch.setenv("LOCAL_RANK", "9")
    for name in (process.RANK, process.RANK_ON_HOST, "OMPI_COMM_WORLD_RANK", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    process.set_local_rank()
    assert os.environ["LOCAL_RANK"] == "9", "this process is no rank"
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "6")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "2")
    process.hide_mpi_variables()
    process.set_local_rank()
    assert os.environ["LOCAL_RANK"] == "2"
    monkeypatch.setenv(process.RANK, "5")
    monkeypatch.setenv(process.RANK_ON_HOST, "1")
    process.set_local_rank()
    assert os.environ["LOCAL_RANK"] == "1"


def test_launcher_options_after_the_script_name_are_reported() -> None:
    for words, late in (
        (["run", "train.py", "-n", "4"], "-n after train.py"),
        (["run", "--timeout", "5", "train.py", "--lr", "1", "--ranks=2"], "--ranks=2 after train.py"),
    ):
        answer = CliRunner().invoke(app, words)
        assert answer.exit_code == 2
        assert f"or --nnodes HOSTS for several hosts; {late} is handed to the script" in answer.output
    plain = CliRunner().invoke(app, ["run", "train.py", "--lr", "1"])
    assert "handed to the script" not in plain.output
    assert CliRunner().invoke(app, ["--version"]).output.startswith(f"recover {__version__} (torch ")


def test_environment_variables_are_read_in_few_modules_only() -> None:
    """Ten modules once parsed the environment, each in its own way."""
    allowed = {"job/spec.py", "launch/preflight.py", "launch/doctor/probe.py", "data/cache.py"}
    reads = re.compile(r"environ(\.get\(|\[)\s*f?[\"']RECOVER_")
    found = {
        str(path.relative_to(ROOT / "recover"))
        for path in (ROOT / "recover").rglob("*.py")
        if reads.search(path.read_text()) and path.parent.name != "programs"  # scripts, as users write them
    }
    assert found <= allowed
