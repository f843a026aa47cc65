"""The same bits, whichever replica died or computed what, and however many replicas there were."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_step import commits, train
from training import check_lines, small_world
from training import train as recover_train
from worlds import Outcome

from recover.runs.report import compare


def trajectory(outcome: Outcome) -> list[tuple[float, str]]:
    """Loss and parameters after every step, to the bit."""
    assert outcome.code == 0, outcome.output
    return [(entry["loss"], entry["digest"]) for entry in commits(outcome)]


# test_trained_parameters_... below and tests/processes/test_randomness_runs.py (with draws) show the same
@pytest.mark.guarantee(
    "The trajectory",
    "A run with `reduction=reproducible` has the same bits with and without deaths, on any number of "
    "replicas and after a resume.",
)
@pytest.mark.soak
def test_reproducible_run_with_deaths_has_the_bits_of_a_failure_free_run(tmp_path: Path) -> None:
    exact = {"reduction": "reproducible", "dropout": 0.1, "noise": 0.1, "steps": 8}
    calm = train(tmp_path, 4, [], "calm", **exact)
    stormy = train(tmp_path, 4, ["2:1:in-reduce", "4:3:backward", "4:0:extra"], "stormy", **exact)
    fewer = train(tmp_path, 2, ["5:1:bucket:1"], "fewer", **{**exact, "accum": 4})
    survivors = [len(outcome.survivors) for outcome in (calm, stormy, fewer)]
    assert survivors[0] == 4
    assert survivors[1] == 1
    assert survivors[2] == 1
    assert trajectory(stormy) == trajectory(calm)
    assert trajectory(fewer) == trajectory(calm)
    fast = train(tmp_path, 2, [], "fast", **{**exact, "accum": 4, "reduction": "fast"})
    assert trajectory(fast) != trajectory(calm)  # or the comparison proves nothing


@pytest.mark.guarantee(
    "The trajectory",
    "A finite gradient or loss never ends a run, overflows keep the bits through the death of their owner, "
    "and a NaN skips the step.",
)
@pytest.mark.parametrize("bits", [32, pytest.param(64, marks=pytest.mark.soak)])
def test_overflows_and_nans_change_no_bits_when_their_owner_dies(tmp_path: Path, bits: int) -> None:
    """Two spikes, each in the share of a replica that dies in that very step, and a NaN after them. Small words have
    too few bits for the exponents that the first step begins with: it runs again with those of its gradients."""
    exact = {"reduction": "reproducible", "spikes": {"10": 1e4, "21": 1e8}, "nan": 31, "steps": 6}
    exact |= {"reduction_bits": bits}
    calm = train(tmp_path, 2, [], "calm", accum=3, **exact)
    stormy = train(tmp_path, 3, ["2:2:vote", "4:1:in-reduce"], "stormy", **exact)
    assert trajectory(calm)[:5] == trajectory(stormy)[:5]
    for outcome in (calm, stormy):
        reruns = [entry["reruns"] for entry in commits(outcome)]
        assert (reruns[0], reruns[1], reruns[3], reruns[5]) == (int(bits == 32), 1, 1, 0), reruns
        assert [entry["skipped"] for entry in commits(outcome)] == [0, 0, 0, 0, 0, 1]
        assert commits(outcome)[5]["digest"] == commits(calm)[4]["digest"], (
            "a skipped step changed parameters"
        )
    assert stormy.survivors == [0]


@pytest.mark.guarantee(
    "The trajectory",
    "A run with `reduction=reproducible` has the same bits with and without deaths, on any number of "
    "replicas and after a resume.",
)
@pytest.mark.parametrize("bits", [64, pytest.param(32, marks=pytest.mark.soak)])
def test_trained_bits_do_not_depend_on_deaths_or_replica_count(tmp_path: Path, bits: int) -> None:
    """With the command that a user would type, and as the report says. One run loses its writer and ends with a
    checkpoint, since too few replicas are left."""
    words = [*small_world(tmp_path), "samples=exact", "reduction=reproducible", "steps=8", "seed=7"]
    words += [f"reduction_bits={bits}"]
    calm = recover_train(tmp_path / "calm", *words, "replicas=1", "accum=16")
    storm = ["2:1:in-reduce", "2:0:extra", "6:2:after-update"]
    runs = [recover_train(tmp_path / "lost-three", *words, "replicas=4", "accum=4", kills=storm)]
    stopped = recover_train(
        tmp_path / "stopped", *words, "replicas=2", "accum=8", "min_replicas=2", kills=["4:0:backward"]
    )
    assert stopped.code == 3, stopped.output
    assert stopped.checkpoints == ["step-4"]
    check_lines(stopped, steps=4, batch=16)
    assert "1 replica is left, and min_replicas is 2" in stopped.output
    runs.append(
        recover_train(tmp_path / "resumed", "replicas=4", "min_replicas=1", resume=tmp_path / "stopped")
    )
    for run in (calm, *runs):
        assert run.code == 0, run.output
    assert [run.summary["replicas_end"] for run in (calm, *runs)] == [1, 1, 4]
    assert {run.summary["parameters_digest"] for run in (calm, *runs)} == {calm.summary["parameters_digest"]}
    assert all(run.summary["environment"]["reduction"] == "reproducible" for run in runs)
    word = {64: "torch.float64", 32: "torch.int32"}[bits]
    assert all(run.summary["environment"]["words"] == [word] for run in runs)
    for line in compare([calm.run_dir, *(run.run_dir for run in runs)]):
        assert "bitwise equal" in line, line


@pytest.mark.guarantee(
    "The trajectory",
    "A run with `reduction=reproducible` has the same bits with and without deaths, on any number of "
    "replicas and after a resume.",
)
@pytest.mark.soak
@pytest.mark.parametrize("bits", [64, 32])
def test_bits_are_those_of_one_replica_on_up_to_twelve(tmp_path: Path, bits: int) -> None:
    """With a spike in a step in which its owner dies."""
    exact = {"reduction": "reproducible", "reduction_bits": bits, "spikes": {"17": 1e4}, "steps": 5}
    told = []
    for replicas in (1, 2, 3, 4, 12):
        kills = [] if replicas == 1 else [f"2:{5 * replicas // 12}:vote"]
        outcome = train(tmp_path, replicas, kills, f"of-{replicas}", accum=12 // replicas, **exact)
        assert len(outcome.survivors) == max(1, replicas - 1)
        told.append(trajectory(outcome))
    assert all(each == told[0] for each in told)


@pytest.mark.guarantee("The trajectory", "The `tiny` model has the same bits with a death at every location.")
@pytest.mark.soak
def test_main_job_has_the_same_bits_with_a_death_at_every_location(tmp_path: Path) -> None:
    words = [
        "samples=exact",
        "reduction=reproducible",
        "steps=20",
        "seed=7",
        "checkpoint.every=6",
        "device=cpu",
    ]
    four = ["replicas=4", "accum=4"]
    calm = recover_train(tmp_path / "calm", *words, *four)
    storms = [
        ["3:1:forward", "7:3:backward", "11:0:vote"],
        ["2:2:bucket", "6:0:checkpoint", "14:1:in-reduce"],
        ["4:0:in-reduce", "4:1:repair", "9:2:after-update"],
        ["5:3:in-reduce", "5:0:extra", "12:1:advance"],
    ]
    runs = [recover_train(tmp_path / str(n), *words, *four, kills=kills) for n, kills in enumerate(storms)]
    runs.append(recover_train(tmp_path / "two", *words, "replicas=2", "accum=8", kills=["10:0:update"]))
    for run in runs:
        assert run.code == 0, run.output
        assert run.summary["replicas_end"] == 1
    for line in compare([calm.run_dir, *(run.run_dir for run in runs)]):
        assert "losses bitwise equal; parameters bitwise equal" in line, line
