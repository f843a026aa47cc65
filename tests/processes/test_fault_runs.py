"""Faults that strike real runs: what they leave alone, and what they must not reach."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_step import check, commits, train
from toy import reference
from training import small_world
from training import train as run_training

from recover.faults.command import check as check_file
from recover.faults.draw import draw_schedule
from recover.faults.schedule import write_schedule


def recover(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "recover.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.guarantee(
    "Faults, hangs and stragglers", "Fault schedules are a pure function of their arguments, and can strike."
)
def test_faults_command_draws_and_checks_schedules_deterministically(tmp_path: Path) -> None:
    options = ("--replicas", 8, "--replica-size", 2, "--count", 5, "--steps", "3:40", "--seed", 1)
    made = recover("faults", "make", *options)
    assert made.stdout == write_schedule(draw_schedule(8, 2, 1, count=5, steps=(3, 40)))
    file = tmp_path / "f.yaml"
    file.write_text(made.stdout)
    found, problems = check_file(file, 8, 2, 40)
    assert (len(found), problems) == (5, [])
    checked = recover("faults", "check", file, "--replicas", 4, "--replica-size", 2, "--steps", 40)
    assert checked.returncode == 1
    assert "there are replicas 0 to 3" in checked.stdout
    file.write_text("- {step: 3, replica: 0, location: vote}\n- {step: 4, replica: 1, location: vote}\n")
    assert check_file(file, 2, 1, 40)[1] == [
        "no replica would be left of 2: the run would be lost; spare one of them"
    ]


@pytest.mark.guarantee(
    "Faults, hangs and stragglers",
    "An exception, a pause, a slow replica and a flipped weight change neither batch nor trajectory.",
)
def test_faults_other_than_stop_change_neither_batch_nor_bits(tmp_path: Path) -> None:
    kills = [
        "2:1:backward=exit",
        "3:2:in-reduce=pause:0.5",
        "4:3:advance=corrupt:weights",
        "6:4:forward=slow:3",
        "7:0:bucket",
    ]
    outcome = train(tmp_path, 5, kills, steps=8)
    flipped = next(note for note in outcome.notes(3, "commit") if note["step"] == 4)
    assert flipped.pop("digest") != commits(outcome)[3]["digest"]  # rank 3 records its digest after the flip
    flipped["digest"] = commits(outcome)[3]["digest"]
    check(outcome, {0, 1, 3}, batch=10)
    assert (outcome.ends[1], outcome.ends[3]) == ("raised", "excluded")
    # The flipped bit was found in the very next step, and what was summed with it was thrown away.
    assert [len(entry["replicas"]) for entry in commits(outcome)] == [5, 4, 4, 4, 3, 3, 2, 2]


@pytest.mark.guarantee(
    "The trajectory", "All replicas skip a step with a NaN gradient; a wrong finite gradient is not detected."
)
def test_nan_gradient_is_skipped_by_all_and_a_wrong_finite_one_is_not_seen(tmp_path: Path) -> None:
    outcome = train(tmp_path, 3, ["2:2:bucket:0=corrupt:gradient", "4:1:bucket=nan"], steps=5)
    assert outcome.code == 0, outcome.output
    assert outcome.survivors == [0, 1, 2]
    notes = [outcome.notes(rank, "commit") for rank in range(3)]
    assert [[entry["skipped"] for entry in entries] for entries in notes] == [[0, 0, 0, 1, 1]] * 3
    digests = [entry["digest"] for entry in notes[0]]
    assert digests == [entry["digest"] for entry in notes[1]]
    assert digests[2] == digests[3]  # the parameters stayed as they were
    start = outcome.notes(0, "start")[0]["parameters"]
    losses, _ = reference(start, [list(range(6 * step, 6 * step + 6)) for step in range(3)])
    told = [entry["loss"] for entry in notes[0]]
    torch.testing.assert_close(told[:2], losses[:2], rtol=1e-5, atol=1e-6)
    assert abs(told[2] - losses[2]) > 1e-4 * losses[2]  # all replicas took the same wrong step


@pytest.mark.guarantee(
    "Faults, hangs and stragglers",
    "A bit that flips on the writer reaches neither a checkpoint nor the digest, also after the last step.",
)
@pytest.mark.soak
@pytest.mark.usefixtures("every_checkpoint_is_awaited")
def test_bit_flip_on_the_writer_reaches_neither_checkpoint_nor_digest(tmp_path: Path) -> None:
    """The vote on step 4 shows the flip after step 3, whose checkpoint is discarded. After step 5 no vote follows."""
    words = [*small_world(tmp_path), "global_batch=6", "steps=5", "reduction=reproducible"]
    calm = run_training(tmp_path / "calm", *words, "replicas=1", "checkpoint.every=5")
    kills = ["3:0:advance=corrupt:weights", "5:1:advance=corrupt:weights"]
    words += ["replicas=5", "checkpoint.every=1", "checkpoint.keep=3"]
    rough = run_training(tmp_path / "rough", *words, kills=kills)
    assert (calm.code, rough.code) == (0, 0), calm.output + rough.output
    assert [i["dead_replicas"] for i in rough.incidents] == [[0], [1]]
    assert rough.summary["parameters_digest"] == calm.summary["parameters_digest"]
    assert rough.checkpoints == ["step-2", "step-4", "step-5"]
    digests = {run.facts("step-5")["parameters_digest"] for run in (calm, rough)}
    assert digests == {calm.summary["parameters_digest"]}
    saved = [load_file(run.run_dir / "checkpoints/step-5/part-0.safetensors") for run in (calm, rough)]
    assert all(torch.equal(value, saved[1][name]) for name, value in saved[0].items())  # the optimizer's, too
