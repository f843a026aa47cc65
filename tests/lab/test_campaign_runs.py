"""Deaths by the dozen: the matrix of places, roles and numbers, and random schedules; broken laws are reported."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from recover_lab.chaos import campaign
from recover_lab.chaos.campaign import run_job
from recover_lab.chaos.cells import MODES, ROLES, all_cells, lay_out
from recover_lab.chaos.invariants import FinishedRun, violations
from recover_lab.chaos.matrix import matrix
from recover_lab.chaos.platforms import CampaignRun
from training import CAN_BE_CUT, small_world

from recover.faults import parse_faults
from recover.train.config import parse

SUBSTRATES = {
    "ddp": ["replicas=8"],
    "hsdp": ["replicas=5", "parallel=hsdp", "shard=2", "microbatch_size=2"],
    "3d": ["replicas=5", "parallel=3d", "pp=2"],
}


@pytest.mark.guarantee(
    "The batch",
    "Every step commits exactly B microbatches when two replicas die at once or during a recovery.",
)
@pytest.mark.guarantee(
    "Sharded replicas (HSDP)",
    "Any rank of a replica may die anywhere; its peers exit with it, and the others commit B microbatches.",
)
@pytest.mark.guarantee(
    "Grids (3D parallelism)",
    "Any rank of a grid may die anywhere; its peers exit with it, and the others commit B microbatches.",
)
@pytest.mark.guarantee(
    "Faults, hangs and stragglers",
    "Deaths of every role at every location, alone, in pairs and during recoveries keep every invariant.",
)
@pytest.mark.parametrize(
    ("job", "number", "roles", "modes"),
    [
        ("replicas=6 parallel=ddp", 12, ROLES, MODES),  # between two steps, in a repair and over checkpoints
        pytest.param(  # in extra work
            "replicas=4 parallel=hsdp shard=2 microbatch_size=2",
            8,
            ("major", "minor", "rank 0"),
            ("one", "then"),
            marks=pytest.mark.soak,
        ),
        pytest.param(  # in the last reduction of the step
            "replicas=4 parallel=3d tp=2",
            12,
            ("spare", "rank 0", "writer"),
            ("one", "two"),
            marks=pytest.mark.soak,
        ),
        pytest.param("replicas=6 parallel=ddp", 10, ROLES, MODES, marks=pytest.mark.soak),
    ],
)
def test_deaths_of_many_roles_in_one_launch_keep_every_invariant(
    tmp_path: Path, job: str, number: int, roles: tuple[str, ...], modes: tuple[str, ...]
) -> None:
    words = dict(word.split("=") for word in job.split())
    replicas, size, kind = int(words["replicas"]), 1 + ("3d" in job or "hsdp" in job), words["parallel"]
    (launch,) = islice(lay_out(all_cells(), replicas, size, "static"), number, number + 1)
    assert {cell.role for cell in launch.cells} >= set(roles)
    assert {cell.mode for cell in launch.cells} == set(modes)
    page = tmp_path / "page.md"
    page.write_text(f"<!-- matrix: {kind} -->\n<!-- end of matrix: {kind} -->\n")
    theirs = [*small_world(tmp_path, **CAN_BE_CUT), *job.split()]
    assert matrix(theirs, launches=1, write=page, cells=sorted(launch.cells, key=str)) == 0
    held = (
        f": {len(launch.cells)} of {len(launch.cells)} cells held; {len(launch.faults)} deaths in 1 launches"
    )
    assert held in page.read_text()


@pytest.mark.guarantee(
    "Faults, hangs and stragglers",
    "Deaths of every role at every location, alone, in pairs and during recoveries keep every invariant.",
)
@pytest.mark.soak
@pytest.mark.parametrize("substrate", SUBSTRATES)
def test_whole_matrix_of_deaths_keeps_every_invariant(tmp_path: Path, substrate: str) -> None:
    assert matrix([*small_world(tmp_path, **CAN_BE_CUT), *SUBSTRATES[substrate]]) == 0


def chaos(place: Path, *options: str) -> subprocess.CompletedProcess[str]:
    job = [*small_world(place), "replicas=3", "accum=2", "steps=5", "reduction=reproducible"]
    command = [
        sys.executable,
        "-m",
        "recover.cli",
        "faults",
        "chaos",
        *options,
        "--",
        "recover",
        "train",
        *job,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.guarantee("Faults, hangs and stragglers", "Random schedules keep every invariant.")
@pytest.mark.soak
def test_chaos_runs_random_schedules_and_checks_every_invariant(tmp_path: Path) -> None:
    result = chaos(tmp_path, "--seed", "25", "--runs", "1", "--output", str(tmp_path / "kept"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "seed 25: 3 replicas, 2 faults" in result.stdout
    assert "chaos: 1 runs, 2 faults, 0 with a violation" in result.stdout
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.guarantee("Faults, hangs and stragglers", "Random schedules keep every invariant.")
@pytest.mark.soak
def test_fifty_random_schedules_keep_every_invariant(tmp_path: Path) -> None:
    result = chaos(tmp_path, "--seed", "5000", "--runs", "50", "--replicas", "4:6")
    assert result.returncode == 0, result.stdout


@pytest.mark.guarantee(
    "Rejoining replicas", "Random schedules that also strike rejoining replicas keep every invariant."
)
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_random_schedules_with_rejoins_keep_every_invariant(tmp_path: Path, kind: str) -> None:
    inside = [] if kind == "ddp" else SUBSTRATES["hsdp"][1:]
    words = [*small_world(tmp_path, **CAN_BE_CUT), *inside, "replicas=4", "accum=2", "reduction=reproducible"]
    words += ["steps=300", "pace=0.05", "checkpoint.every=1", "checkpoint.keep=1"]
    platform = campaign.LocalMachine(returns=True)
    assert campaign.chaos(words, 7000, None, 5, output=tmp_path / "kept", platform=platform) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--replicas", "6:4"], "--replicas 6:4: one replica must be left; give a range from 2 on"),
        (["--replicas", "1:4"], "--replicas 1:4: one replica must be left"),
        (["--replicas", "2:9"], "replicas=7 are more than the 6 microbatches of a step"),
    ],
)
def test_chaos_refuses_impossible_settings_and_leaves_nothing(
    tmp_path: Path, options: list[str], said: str
) -> None:
    result = chaos(tmp_path, *options, "--output", str(tmp_path / "kept"))
    assert result.returncode == 2, result.stdout
    assert said in result.stderr.replace("\n", " ")
    assert not (tmp_path / "kept").exists()


def pretend(
    place: Path, losses: tuple[float, ...] = (3.0, 2.0), digest: str = "d", dead: int = 1
) -> FinishedRun:
    """The files of a healthy run of 3 replicas that has lost one of them in its second step."""
    (place / "ranks").mkdir(parents=True)
    lines = [
        {"step": i, "microbatches": 6, "loss": loss, "data_digest": f"s{i}"}
        for i, loss in enumerate(losses, 1)
    ]
    (place / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "incidents.jsonl").write_text(
        json.dumps({"step": 2, "epoch": 2, "dead_replicas": [dead]}) + "\n"
    )
    (place / "summary.json").write_text(json.dumps({"parameters_digest": digest}))
    for rank in {0, 1, 2} - {dead}:
        (place / "ranks" / f"{rank}.end").write_text('{"end": "done"}')
    return FinishedRun(place, 0, 999_999)


@pytest.mark.guarantee("Faults, hangs and stragglers", "The campaign reports a broken invariant.")
def test_chaos_reports_every_broken_invariant(tmp_path: Path) -> None:
    config = parse({"replicas": "3", "accum": "2", "steps": "2", "reduction": "reproducible"})
    faults = parse_faults(["2:1:vote"])
    calm, good = pretend(tmp_path / "calm"), pretend(tmp_path / "good")

    def told(run: FinishedRun, said: str) -> None:
        assert any(said in law for law in violations(run, config, faults, calm)), said

    assert list(violations(good, config, faults, calm)) == []
    told(FinishedRun(good.run_dir, 1, 1), "exit code 1")
    told(pretend(tmp_path / "short", losses=(3.0,)), "steps.jsonl has the steps [1] of 2")
    told(pretend(tmp_path / "bits", digest="e"), "other parameters")
    told(pretend(tmp_path / "loss", losses=(3.0, 2.5)), "other losses")
    bystander = pretend(tmp_path / "bystander", dead=2)
    told(bystander, "replicas [2] were lost, and nothing was scheduled")
    (bystander.run_dir / "ranks" / "2.end").write_text('{"end": "fenced"}')
    told(bystander, "replicas [2] were killed by their peers, and nothing was wrong with them")
    slow = (*faults, *parse_faults(["2:0:forward=sample:9"]))
    note = bystander.run_dir / "ranks" / "2.slot"
    for step, innocent in ((2, False), (1, True)):  # it was computing that sample, or another one
        note.write_text(json.dumps({"step": step, "suspects": [[0, 6]], "why": ""}))
        laws = violations(bystander, config.model_copy(update={"hang_limit": 5.0}), slow, calm)
        assert any("killed by their peers" in law for law in laws) == innocent
    told(bystander, "replicas [1] were not lost as scheduled")
    torn = pretend(tmp_path / "torn")
    (torn.run_dir / "steps.jsonl").write_text((good.run_dir / "steps.jsonl").read_text()[:-1])
    told(torn, "the last line of steps.jsonl is torn")
    (torn.run_dir / "steps.jsonl").write_text((good.run_dir / "steps.jsonl").read_text()[:-20])
    told(torn, "the last line of steps.jsonl is torn")
    (torn.run_dir / "summary.json").unlink()
    told(torn, "summary.json cannot be read: ")
    other = pretend(tmp_path / "other")
    lines = (other.run_dir / "steps.jsonl").read_text()
    (other.run_dir / "steps.jsonl").write_text(lines.replace('"microbatches": 6', '"microbatches": 5', 1))
    told(other, "steps [1] were not taken on 6 microbatches")
    (other.run_dir / "steps.jsonl").write_text(lines.replace("s2", "s3"))
    told(other, "other samples")
    (other.run_dir / "ranks" / "2.end").unlink()
    told(other, "1 ranks have finished; 2 should have")
    back = pretend(tmp_path / "back")
    with open(back.run_dir / "incidents.jsonl", "a") as file:
        file.write(json.dumps({"step": 2, "epoch": 3, "dead_replicas": [], "joined_replicas": [3]}) + "\n")
    told(back, "2 ranks have finished; 3 should have")
    (back.run_dir / "ranks" / "3.end").write_text('{"end": "done"}')
    assert list(violations(back, config, faults, calm)) == []
    command = [sys.executable, "-c", "import time; time.sleep(100000)"]
    with subprocess.Popen(command, env={"RECOVER_RUN_DIR": str(good.run_dir)}) as straggler:
        told(good, f"process {straggler.pid} of the run is still running")
        straggler.kill()


def test_chaos_ends_a_run_that_exceeds_its_time_limit(tmp_path: Path) -> None:
    words = [*small_world(tmp_path), "replicas=2", "steps=9", "pace=9"]
    run = run_job(CampaignRun(words, tmp_path / "run", limit=4))
    assert run.code == -9
    assert list(violations(run, parse({}), ())) == ["exit code -9"]
