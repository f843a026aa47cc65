"""Verified gradients in real runs: a device that errs is found, named by every monitor, and costs no bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from causes_told import why
from training import Trained, small_world, train

from recover.runs.live.prometheus import exposition
from recover.runs.live.view import RunView

COMMON = ("replicas=3", "accum=2", "steps=6", "reduction=reproducible")


def errs(tmp_path: Path, name: str, fault: str, *words: str, **shape: int) -> Trained:
    """A run in which the device of one rank errs; `fault`: as `4:1.0:check=errs:1`."""
    (tmp_path / f"{name}.yaml").write_text(_as_yaml(fault))
    return train(
        tmp_path / name, *small_world(tmp_path), *COMMON, "verify=1", *words, f"faults={tmp_path / name}.yaml"
    )


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
def test_device_that_errs_is_evicted_and_named_by_every_monitor(tmp_path: Path) -> None:
    """One launch: always wrong from its checked slot of step 4 on, with the same wrong result each time."""
    calm = train(tmp_path / "calm", *small_world(tmp_path), *COMMON)
    run = errs(tmp_path, "errs", "4:1:check=errs:1")
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
    }
    metrics = exposition(view).decode()
    for line in ("verified_slots_total", "unverified_slots_total", "corrupt_gradients_total"):
        assert f"recover_{line}" in metrics, metrics
    assert (run.summary["verified"], run.summary["unverified"], run.summary["corrupt"]) == (5, 1, 1)
    assert "verified" not in calm.summary


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
    run = errs(tmp_path, "errs", f"4:1.{local}:check=errs:1", *parallel, num_hidden_layers=2)
    assert run.code == 0, run.output
    assert run.summary["parameters_digest"] == calm.summary["parameters_digest"]
    (incident,) = run.incidents
    assert incident["dead_ranks"] == [2, 3]
    assert "(rank" in incident["evicted"]["1"], incident
    assert run.summary["corrupt"] == 1
