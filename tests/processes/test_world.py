"""`World` apart from survival: one verdict, no orphans that block others, refusals with the remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from causes_told import why
from patience import PATIENCE
from worlds import CARRIERS, PROGRAMS, run_world

from recover.job.grid import Grid
from recover.launch import foreign_mpirun
from recover.launch.foreign_mpirun import make_shared_directory
from recover.world.liveness.board import Board


@pytest.mark.guarantee(
    "Membership", "A rank that dies between the votes of two groups does not split healthy replicas."
)
@pytest.mark.parametrize(("protocol", "torn"), [("per-group", True), ("world", False)])
def test_verdict_per_group_tears_the_world_and_a_global_one_does_not(
    tmp_path: Path, protocol: str, torn: bool
) -> None:
    outcome = run_world("split_verdict.py", tmp_path / "run", 4, [protocol], 2, kills=["1:1.0:vote"])
    verdicts = {rank: outcome.notes(rank, "verdict")[0]["verdict"] for rank in (0, 1)}
    assert (verdicts[0] != verdicts[1]) is torn, f"{verdicts}\n{outcome.output}"


@pytest.mark.guarantee(
    "Membership", "An orphan blocked in a call to its peers delays the others by less than a second."
)
@pytest.mark.guarantee("Monitoring", "An orphan is never named as the cause.")
def test_orphan_blocked_in_gloo_does_not_delay_the_others(tmp_path: Path) -> None:
    outcome = run_world("orphan.py", tmp_path / "run", 6, replica_size=3)
    assert outcome.survivors == [0, 1, 2], outcome.output
    assert (outcome.ends[3], outcome.ends[4]) == ("orphan", "orphan"), outcome.output
    (story,) = why(tmp_path / "run")
    assert [(death["rank"], death["cause"]) for death in story["first"]] == [(5, "killed")]
    followed = {death["rank"]: (death["cause"], death["because_of"]) for death in story["followed"]}
    assert followed == {3: ("orphan", 5), 4: ("orphan", 5)}


@pytest.mark.guarantee("User code", "A stock DDP model on torch backend `ulfm` has the losses of gloo.")
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


@pytest.mark.guarantee("User code", "The primitives of the paper return the same on every survivor.")
def test_primitives_return_the_same_on_every_survivor(tmp_path: Path) -> None:
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


def test_device_mesh_accepts_ulfm_across_replicas_and_refuses_it_inside(tmp_path: Path) -> None:
    outcome = run_world("mesh.py", tmp_path / "run", 4, replica_size=2)
    assert outcome.code == 0, outcome.output


def _mpirun(*words: str, script: str) -> subprocess.CompletedProcess[str]:
    """A site's own mpirun: no launcher of ours, no bootstrap."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RECOVER_")}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = Path(sys.executable).parent / "mpirun"
    command = [str(mpirun), "--oversubscribe", *words, sys.executable, "-c", script]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=PATIENCE, check=False
    )


@pytest.mark.guarantee("The launcher", "A world without fault tolerance is refused.")
def test_world_without_fault_tolerance_is_refused_with_the_remedy() -> None:
    result = _mpirun("-np", "1", script="import recover; recover.init()")
    assert "--with-ft ulfm" in result.stderr


ULFM = ("--with-ft", "ulfm", "--mca", "coll", "^han", "--mca", "coll_ftagree_era_topology", "2")


@pytest.mark.guarantee(
    "Strangers", "A job under a foreign mpirun ends well on every rank and leaves nothing in shared memory."
)
def test_foreign_mpirun_starts_a_job(tmp_path: Path) -> None:
    script = (
        "import recover, os, signal\n"
        "world = recover.init()\n"
        "assert world.agree(1) == 1\n"
        "left = [name for name in os.listdir('/dev/shm') if f'-{os.getppid()}-' in name]\n"
        "assert left == [], f'{left} would stay behind if all ranks were killed now'\n"
        "if world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "assert world.agree(1) is None\n"
        "print('left', world.repair().members, flush=True)\n"
    )
    result = _mpirun(*ULFM, "-np", "3", script=script)
    assert result.stdout.count("left (0, 2)") == 2, result.stderr


@pytest.mark.guarantee(
    "Strangers",
    "Replicas of several ranks under a foreign mpirun rendezvous in its run directory and listen on "
    "loopback on a single host.",
)
def test_foreign_mpirun_replicas_rendezvous_in_the_run_directory(
    tmp_path: Path,
) -> None:
    script = (
        "import os, socket, torch, recover\n"
        f"os.environ['RECOVER_RUN_DIR'] = {str(tmp_path)!r}\n"
        "from recover.parallel.torch_world import init_replica_world\n"
        "from recover.world.carriers.gloo_sockets import open_sockets\n"
        "world = recover.init(replica_size=2)\n"
        "init_replica_world(world)\n"
        "peers = torch.tensor([world.rank])\n"
        "torch.distributed.all_reduce(peers)\n"
        "sockets = [socket.socket(fileno=os.dup(each)) for each in open_sockets()]\n"
        "open_to = [each.getsockname()[0] for each in sockets if each.family in (socket.AF_INET, socket.AF_INET6)\n"
        "    and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]\n"
        "print(world.replica, peers.item(), os.environ['GLOO_SOCKET_IFNAME'], set(open_to), flush=True)\n"
    )
    result = _mpirun(*ULFM, "--mca", "btl", "self,sm", "-np", "4", script=script)
    assert (
        sorted(result.stdout.splitlines()) == ["0 1 lo {'127.0.0.1'}"] * 2 + ["1 5 lo {'127.0.0.1'}"] * 2
    ), result.stderr


@pytest.mark.guarantee(
    "Strangers", "A job under a foreign mpirun ends well on every rank and leaves nothing in shared memory."
)
@pytest.mark.soak
def test_foreign_mpirun_ends_ten_jobs_well_on_every_rank(tmp_path: Path) -> None:
    for job in range(10):
        run_dir = tmp_path / str(job)
        script = f"import recover, os; os.environ['RECOVER_RUN_DIR'] = {str(run_dir)!r}; recover.init()"
        result = _mpirun(*ULFM, "-np", "4", script=script)
        ends = [json.loads((run_dir / "ranks" / f"{rank}.end").read_text())["end"] for rank in range(4)]
        assert ends == ["done"] * 4, result.stderr


# In one write: both ranks write to the same pipe.
WHERE = (
    "import os; from recover.launch.foreign_mpirun import make_shared_directory as make; "
    "os.write(1, str(make()).encode() + bytes([10]))"
)


@pytest.mark.guarantee(
    "Strangers",
    "Ranks under any mpirun use a rendezvous directory of their own job and refuse a planted one.",
)
def test_foreign_mpirun_rendezvous_directory_is_one_per_job(tmp_path: Path) -> None:
    """Also behind a wrapper, and if two jobs have the same namespace, as happens when a process id is used again."""
    rank = f"'{sys.executable}' -c '{WHERE}'"
    launcher = f'export PMIX_NAMESPACE="prterun@1"; {rank} & sh -c "{rank}; true"; wait'
    places = [
        subprocess.check_output(["bash", "-c", launcher], text=True, env={**os.environ}).split()
        for _ in range(2)
    ]
    for pair in places:
        assert len(pair) == 2
        assert len(set(pair)) == 1
        found = Path(pair[0])
        assert found.stat().st_mode & 0o777 == 0o700
        found.rmdir()
    assert places[0] != places[1]


@pytest.mark.guarantee(
    "Strangers",
    "Ranks under any mpirun use a rendezvous directory of their own job and refuse a planted one.",
)
@pytest.mark.parametrize("planted", ["link", "file", "open directory"])
def test_planted_rendezvous_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    monkeypatch.setattr(foreign_mpirun, "MEMORY", tmp_path)
    place = make_shared_directory()
    place.rmdir()
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    if planted == "link":
        place.symlink_to(target)
    elif planted == "file":
        place.touch(0o600)
    else:
        place.mkdir()
        place.chmod(0o777)
    with pytest.raises(PermissionError, match=r"another user made it; remove it"):
        make_shared_directory()


@pytest.mark.guarantee("Strangers", "The board follows no symbolic link and starts from zero.")
def test_board_follows_no_link_and_resets_foreign_counts(tmp_path: Path) -> None:
    victim = tmp_path / "thesis.txt"
    victim.write_text("words")
    (tmp_path / "link").symlink_to(victim)
    with pytest.raises(PermissionError, match="is a link"):
        Board(tmp_path / "link", 2)
    assert victim.read_text() == "words"
    stale = Board(tmp_path / "board", 2)
    stale._table[:] = 5000
    board = Board(tmp_path / "board", 2)
    board.claim(1)
    assert (board.finished(1), board.entered(1), board.arrived(1), board.joined(1)) == (0, 0, 0, False)
    assert board.pid(1) == os.getpid()
    board.enter(1, 7)
    board.claim(1)  # the launcher's bootstrap has done so before recover.init()
    assert board.entered(1) == 7


def test_grid_that_does_not_divide_the_ranks_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="multiple of the replica size"):
        Grid.of(5, 2)


def test_programs_are_all_used() -> None:
    tests = Path(__file__).parents[1]
    text = "".join(path.read_text() for path in [*tests.glob("*.py"), *tests.glob("*/test_*.py")])
    assert [p.name for p in PROGRAMS.glob("*.py") if p.name not in text] == []


@pytest.mark.guarantee(
    "Membership",
    "Operations of the cross group are right on every type with every carrier (`nccl` on a GPU: "
    "`TEST_DEVICE=cuda`).",
)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_carrier_operations_are_right_on_every_type(tmp_path: Path, carrier: str) -> None:
    outcome = run_world("operations.py", tmp_path / "run", 3, [carrier])
    assert outcome.code == 0, outcome.output
    assert "one per member" in outcome.output


@pytest.mark.guarantee(
    "Membership",
    "A receiver of a partial message is freed when the rest is lost, in every operation, whether the sender "
    "dies, aborts or is evicted.",
)
def test_receiver_of_a_partial_message_is_freed_when_the_rest_is_lost() -> None:
    program = Path(__file__).parent.parent / "programs" / "half_a_message.py"
    found = subprocess.run(
        [sys.executable, "-P", program], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    ends = dict(line.rsplit(": ", 1) for line in found.stdout.splitlines())
    assert len(ends) == 12, found.stdout + found.stderr  # every operation, with every end
    assert "forgotten" not in ends.values(), found.stdout
    assert {ends[f"{each}, a sender that dies"] for each in ("broadcast", "exchange")} == {"freed"}


@pytest.mark.guarantee(
    "Strangers",
    "A stranger at a rank's port neither enters nor hangs nor ends the job, and ranks on one host listen on "
    "loopback only.",
)
def test_stranger_at_a_rank_port_neither_enters_nor_hangs_nor_ends_the_job(tmp_path: Path) -> None:
    outcome = run_world("strangers.py", tmp_path / "run", 3)
    assert outcome.code == 0, outcome.output
    # An impostor, noise, two processes that play a peer, no process.
    rounds = "['is not that rank', 'made', 'given up', 'given up', 'made']"
    assert outcome.output.count(f"members (0, 1) {rounds}") == 2, outcome.output
    assert outcome.ends == {0: "done", 1: "done"}, outcome.output
