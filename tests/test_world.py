"""What the world promises beyond surviving: one verdict, no orphans that hold others up, refusals with the mend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from worlds import PROGRAMS, run_world

from recover.job.grid import Grid


@pytest.mark.parametrize(("protocol", "torn"), [("per-group", True), ("world", False)])
def test_a_verdict_per_group_tears_and_one_over_the_world_does_not(
    tmp_path: Path, protocol: str, torn: bool
) -> None:
    outcome = run_world("split_verdict.py", tmp_path / "run", 4, [protocol], 2, kills=["1:1.0:vote"])
    verdicts = {rank: outcome.notes(rank, "verdict")[0]["verdict"] for rank in (0, 1)}
    assert (verdicts[0] != verdicts[1]) is torn, f"{verdicts}\n{outcome.output}"


def test_an_orphan_blocked_in_gloo_does_not_hold_the_others_up(tmp_path: Path) -> None:
    outcome = run_world("orphan.py", tmp_path / "run", 6, replica_size=3)
    assert outcome.survivors == [0, 1, 2], outcome.output
    assert (outcome.ends[3], outcome.ends[4]) == ("orphan", "orphan"), outcome.output
    killed = float((tmp_path / "run" / "killed-at").read_text())
    assert max(outcome.notes(rank, "times")[0]["repaired"] for rank in (0, 1, 2)) - killed < 1.0


def test_stock_ddp_on_backend_ulfm_has_the_losses_of_gloo(tmp_path: Path) -> None:
    losses = {}
    for backend in ("gloo", "ulfm"):
        outcome = run_world(
            "stock_ddp.py", tmp_path / backend, 2, [backend, str(tmp_path / f"store-{backend}")]
        )
        assert outcome.code == 0, outcome.output
        losses[backend] = [outcome.notes(rank, "losses")[0]["losses"] for rank in (0, 1)]
    np.testing.assert_allclose(losses["ulfm"], losses["gloo"], rtol=1e-6)
    assert losses["ulfm"][0] != losses["ulfm"][1]  # each replica saw data of its own


def test_the_primitives_tell_every_survivor_the_same(tmp_path: Path) -> None:
    outcome = run_world("primitives.py", tmp_path / "run", 5, kills=["1:1:bucket", "2:0:bucket"])
    assert outcome.survivors == [2, 3, 4], outcome.output
    first = {rank: outcome.notes(rank, "first death")[0] for rank in (0, 2, 3, 4)}
    for note in first.values():
        assert note["failed"] == [1]
        assert note["contributions"] == 4 + 2 + 4 + 2
        assert note["roles"] == {"major": 2, "minor": 1, "minor-spare": 1}
        assert not note["boundary"]
        assert note["epoch"] == 2
    assert first[3]["mine"] == "major"
    for rank in (2, 3, 4):
        second = outcome.notes(rank, "second death")[0]
        assert second["boundary"]
        assert second["failed"] == [0]
        assert outcome.notes(rank, "boundary")[0]["failures"] is False


def test_a_device_mesh_takes_ulfm_across_replicas_and_refuses_it_inside(tmp_path: Path) -> None:
    outcome = run_world("mesh.py", tmp_path / "run", 4, replica_size=2)
    assert outcome.code == 0, outcome.output


def test_init_outside_of_mpirun_says_how_to_start() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import recover; recover.init()"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "recover run -n RANKS SCRIPT" in result.stderr


def _mpirun(*words: str, script: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """A site's own mpirun: no launcher of ours, no bootstrap."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RECOVER_")}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = Path(sys.executable).parent / "mpirun"
    command = [str(mpirun), "--oversubscribe", *words, sys.executable, "-c", script]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=timeout, check=False
    )


def test_a_world_without_fault_tolerance_is_refused_with_the_mend() -> None:
    result = _mpirun("-np", "1", script="import recover; recover.init()")
    assert "--with-ft ulfm" in result.stderr


def test_a_sites_own_mpirun_will_do(tmp_path: Path) -> None:
    script = (
        "import recover, os, signal\n"
        "world = recover.init()\n"
        "if world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "assert world.agree(1) is None\n"
        "print('left', world.repair().members, flush=True)\n"
    )
    words = [
        "--with-ft",
        "ulfm",
        "--mca",
        "coll",
        "^han",
        "--mca",
        "coll_ftagree_era_topology",
        "2",
        "-np",
        "3",
    ]
    result = _mpirun(*words, script=script)
    assert result.stdout.count("left (0, 2)") == 2, result.stderr
    assert not list(Path("/dev/shm").glob("recover-*-*prterun*"))


def test_a_grid_that_does_not_divide_is_refused_with_the_mend() -> None:
    with pytest.raises(ValueError, match="multiple of the replica size"):
        Grid.of(5, 2)


def test_programs_are_all_used() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [p.name for p in PROGRAMS.glob("*.py") if p.name not in text] == []


@pytest.mark.parametrize("carrier", ["mpi", "gloo"])
def test_operations_are_right_on_every_type(tmp_path: Path, carrier: str) -> None:
    outcome = run_world("operations.py", tmp_path / "run", 3, [carrier])
    assert outcome.code == 0, outcome.output
    assert "one per member" in outcome.output
