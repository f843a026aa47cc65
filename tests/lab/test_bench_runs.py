"""Both sides of the evaluation, end to end: the same job, the same kill, and the same loss after it."""

from __future__ import annotations

from pathlib import Path

import pytest
from recover_lab.peers.metrics import recoveries, restarts
from recover_lab.peers.runs import run_baseline, run_ours
from recover_lab.peers.scene import Scene

SCENE = Scene(replicas=2, accum=2, pace=0.02, steps=5, kills=((4, 1),), save_every=1, seq_len=32)


@pytest.mark.soak
def test_both_systems_end_a_killed_run_with_undisturbed_parameters(tmp_path: Path) -> None:
    run_both_sides(SCENE, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(
    "kind", [{"shard": 2}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=["hsdp", "tp", "pp", "3d"]
)
def test_both_systems_recover_replicas_of_several_ranks(kind: dict[str, int], tmp_path: Path) -> None:
    run_both_sides(SCENE.but(**kind), tmp_path)


def run_both_sides(scene: Scene, place: Path) -> None:
    calm = run_baseline(scene.but(kills=()), place / "calm")
    struck = run_baseline(scene, place / "struck")
    ours = run_ours(scene, place / "ours")

    (restart,) = restarts(struck)
    stamps = [getattr(restart, letter) for letter in "ABCDEFGH"]
    assert stamps == sorted(stamps)
    assert min(restart.pieces().values()) >= 0
    assert {each["life"] for each in struck} == {0, 1}  # killed once, not again
    again = [each["step"] for each in struck if each["what"] == "step-end" and each["life"] == 1]
    assert min(again) in (
        3,
        4,
    )  # from a whole checkpoint: the last one, or if that was still being written, the one before

    (recovery,) = recoveries(ours, since=3)
    assert min(recovery.pieces().values()) >= 0
    assert {each["microbatches"] for each in ours if each["what"] == "step-end"} == {4}

    def final_loss(events: list[dict[str, float]]) -> float:
        return next(each["loss"] for each in reversed(events) if each.get("step") == 5 and "loss" in each)

    assert final_loss(struck) == final_loss(calm)
    assert final_loss(ours) == pytest.approx(final_loss(calm), rel=1e-5)
