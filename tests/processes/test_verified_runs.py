"""Verified gradients in real runs: a device that errs is found, named by every monitor, and costs no bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from causes_told import why
from detection_times import assert_agrees
from training import CAN_BE_CUT, Trained, small_world, train

from recover.runs.live.prometheus import exposition
from recover.runs.live.view import RunView
from recover.runs.report.explanation import tell
from recover.runs.report.recorded_runs import read_runs

COMMON = ("replicas=3", "accum=2", "steps=6", "reduction=reproducible")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    place = tmp_path_factory.mktemp("calm")
    return train(place / "run", *small_world(place), *COMMON)


def errs(tmp_path: Path, name: str, faults: Sequence[str], *words: str, **shape: int) -> Trained:
    """A run in which the device of one rank errs; `faults`: as `4:1.0:check=errs:1`."""
    (tmp_path / f"{name}.yaml").write_text("".join(map(_as_yaml, faults)))
    world = small_world(tmp_path, **shape)
    return train(tmp_path / name, *world, *COMMON, "verify=1", *words, f"faults={tmp_path / name}.yaml")


def _as_yaml(fault: str) -> str:
    place, action = fault.split("=")
    step, whom, location = place.split(":")
    replica, _, local = whom.partition(".")
    entry = {"step": int(step), "replica": int(replica), "local": int(local or 0), "location": location}
    return f"- {json.dumps({**entry, 'action': action})}\n"


@pytest.mark.guarantee(
    "Verified gradients",
    "The evicted replica, its host, ranks and slot are named by `recover why`, the page and the metrics, with the "
    "number of steps since its last passed check.",
)
def test_device_that_errs_is_evicted_and_named_by_every_monitor(tmp_path: Path, calm: Trained) -> None:
    """One launch: the device errs always from the verified slot of step 4 on, with the same wrong result each time."""
    run = errs(tmp_path, "errs", ["4:1:check=errs:1"])
    assert run.code == 0, run.output
    assert run.summary["parameters_digest"] == calm.summary["parameters_digest"]
    assert [(line["verified"], line["unverified"]) for line in run.steps] == [(1, 0)] * 3 + [(0, 1)] + [
        (1, 0)
    ] * 2
    (incident,) = run.incidents
    reason = incident["evicted"]["1"]
    assert incident["step"] == 4, run.incidents
    assert reason.startswith("its gradient of slot "), reason
    assert "(rank 1 on " in reason, reason
    assert "its last passed check was in step 1, 2 steps were committed since" in reason, reason
    assert reason in json.dumps(why(run.run_dir))
    view = RunView(run.run_dir)
    view.refresh(at_once=True)
    assert view.state()["verification"] == {
        "verified_slots": 5,
        "unverified_slots": 1,
        "corrupt_gradients": 1,
        "wrong_sums": 0,
    }
    metrics = exposition(view).decode()
    for line in (
        "verified_slots_total",
        "unverified_slots_total",
        "corrupt_gradients_total",
        "wrong_sums_total",
    ):
        assert f"recover_{line}" in metrics, metrics
    assert (run.summary["verified"], run.summary["unverified"], run.summary["corrupt"]) == (5, 1, 1)
    assert "verified" not in calm.summary


@pytest.mark.guarantee(
    "Verified gradients",
    "Ranks whose reduced sums were wrong are named by the log, `recover why`, the page and the metrics.",
)
def test_wrong_sums_are_found_and_named_by_every_monitor(tmp_path: Path, calm: Trained) -> None:
    """One launch: the reduced sum of one rank is wrong in step 3, the local sum of another one in step 5."""
    faults = ["3:1:reduced=corrupt:sum", "5:0:bucket=corrupt:gradient"]
    run = errs(tmp_path, "sums", faults)
    assert run.code == 0, run.output
    assert run.summary["parameters_digest"] == calm.summary["parameters_digest"]
    again, evicted = run.incidents
    assert (again["step"], again["dead_ranks"], again["extra_microbatches"]) == (3, [], 0), again
    (named,) = again["wrong_sums"]
    assert named.startswith("rank 1 on "), named
    assert f"the reduced sums of {named} were wrong, and all were reduced again" in run.output
    assert (evicted["step"], evicted["dead_ranks"]) == (5, [0])
    assert "wrong_sums" not in evicted
    assert evicted["evicted"]["0"].startswith(
        "its sum of gradients is wrong: it does not hold what was added to it"
    )
    assert evicted["evicted"]["0"] in json.dumps(why(run.run_dir))
    told = "\n".join(tell(read_runs([run.run_dir])[0]))
    assert f"step 3: the reduced sums of {named} were wrong" in told, told
    view = RunView(run.run_dir)
    view.refresh(at_once=True)
    assert view.state()["verification"] == {
        "verified_slots": 6,
        "unverified_slots": 0,
        "corrupt_gradients": 1,
        "wrong_sums": 1,
    }
    assert [one["wrong_sums"] for one in view.incidents()] == [[named], []]
    assert 'recover_wrong_sums_total{run="sums"} 1.0' in exposition(view).decode()
    assert (run.summary["corrupt"], run.summary["wrong_sums"]) == (1, 1)


@pytest.mark.soak
@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize(
    "parallel",
    [
        ("parallel=hsdp", "shard=2", "microbatch_size=2"),
        ("parallel=3d", "pp=2"),
        ("parallel=3d", "tp=2"),
    ],
)
def test_wrong_sums_of_one_rank_of_a_sharded_replica(
    tmp_path: Path, parallel: tuple[str, ...], bits: int
) -> None:
    """The reduced sum of rank 1, and later the local one of rank 3, which costs its replica."""
    words = *parallel, f"reduction_bits={bits}"
    calm = train(tmp_path / "calm", *small_world(tmp_path, **CAN_BE_CUT), *COMMON, *words)
    faults = ["3:0.1:reduced=corrupt:sum", "5:1.1:bucket=corrupt:gradient"]
    run = errs(tmp_path, "sums", faults, *words, **CAN_BE_CUT)
    assert run.code == 0, run.output
    assert run.summary["parameters_digest"] == calm.summary["parameters_digest"]
    again, evicted = run.incidents
    assert [told.partition(" on ")[0] for told in again["wrong_sums"]] == ["rank 1"], again
    assert evicted["dead_ranks"] == [2, 3]
    assert "(rank 3" in evicted["evicted"]["1"], evicted


@pytest.mark.soak
@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        (("parallel=hsdp", "shard=2", "microbatch_size=2"), 2),
        (("parallel=3d", "pp=2"), 2),
        (("parallel=3d", "tp=2"), 2),
    ],
)
@pytest.mark.parametrize("local", [0, 1])
def test_one_rank_of_a_sharded_replica_errs(
    tmp_path: Path, parallel: tuple[str, ...], ranks: int, local: int
) -> None:
    """In a pipeline, the verified slot is a round of its own on both sides."""
    calm = train(tmp_path / "calm", *small_world(tmp_path, num_hidden_layers=2), *COMMON, *parallel)
    run = errs(tmp_path, "errs", [f"4:1.{local}:check=errs:1"], *parallel, num_hidden_layers=2)
    assert run.code == 0, run.output
    assert run.summary["parameters_digest"] == calm.summary["parameters_digest"]
    (incident,) = run.incidents
    assert incident["dead_ranks"] == [2, 3]
    assert "(rank" in incident["evicted"]["1"], incident
    assert run.summary["corrupt"] == 1


@pytest.mark.soak
def test_time_to_detection_of_real_runs_agrees_with_the_simulator(tmp_path: Path) -> None:
    """From the first step in which the device may err to the step that evicts it, both counted."""
    replicas, chance, longest = 3, 0.5, 40
    steps = []
    for seed in range(20):
        first, erring = 2 + seed % 5, seed % replicas
        # Faults at both places: whichever the rank comes to first in that step strikes.
        faults = [f"{first}:{erring}:{place}=errs:{chance}" for place in ("check", "forward")]
        words = (f"seed={seed}", f"steps={first + longest}", "checkpoint.every=0")
        run = errs(tmp_path, f"seed-{seed}", faults, *words)
        assert run.code == 0, run.output
        (incident,) = run.incidents
        assert incident["dead_ranks"] == [erring]
        steps.append(incident["step"] + 1 - first)
    assert_agrees(steps, replicas, chance)
