"""Frozen, unfrozen and unused parameters, in real runs with deaths."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds import run_world


@pytest.mark.guarantee(
    "Trained parameters",
    "Frozen, unfrozen and unused parameters match one process through a death in the same step, and a "
    "replica that freezes alone is evicted.",
)
def test_frozen_and_unused_parameters_match_one_process_through_deaths(tmp_path: Path) -> None:
    """With a death in the step of a freeze and an unfreeze; in the end one replica changes alone."""
    sections = ["frozen", "double", "complex", "ddp", "stray", "left-overs", "unlike", "alone", "scaled"]
    kills = ["3:3:in-reduce", "6:4:forward"]
    outcome = run_world("belonging.py", tmp_path / "run", 5, [sections], kills=kills)
    assert outcome.code == 0, outcome.output
    assert outcome.survivors == [0, 2], outcome.output
    assert outcome.ends[1] == "excluded", outcome.output
    for rank in (0, 2):
        notes = {name: outcome.notes(rank, name)[0] for name in (*sections[:3], "ddp", "alone")}
        assert notes["frozen"]["error"] < 1e-6
        assert notes["frozen"]["incidents"] == [
            0,
            0,
            1,
            0,
            1,
            1,
        ]  # a change, with a death or without: one repair
        assert notes["double"]["error"] < 1e-12
        assert notes["complex"]["error"] < 1e-6
        assert notes["ddp"]["error"] < 1e-6
        assert notes["alone"]["error"] < 1e-6
        assert (notes["alone"]["incidents"], notes["alone"]["replicas"]) == ([0, 1, 0], [0, 2])
        (ddp,) = outcome.notes(rank, "ddp frozen")
        assert "give Step the plain module instead of DDP" in ddp["error"]
        (stray,) = outcome.notes(rank, "stray")
        assert "6 parameters (early.weight, early.bias, late.weight, ...)" in stray["error"]
        assert outcome.notes(rank, "after a stray")[0] | {"kind": ""} == {
            "kind": "",
            "steps": 1,
            "left": [False] * 8,
        }
        assert outcome.notes(rank, "no left-overs")[0]["said"] == []
        said = outcome.notes(rank, "left-overs")[0]["said"]
        starts = [
            "the loss is divided by 4",
            "clip_grad_norm_ or",
            "optimizer.step() was",
            "scheduler.step() was",
        ]
        assert [any(line.startswith(start) for line in said) for start in starts] == [True] * 4, said
        assert len(said) == 4, said
        assert "replicas have made different models" in outcome.notes(rank, "unlike")[0]["error"]
        assert "bf16 autocast" in outcome.notes(rank, "scaled")[0]["error"]


@pytest.mark.guarantee(
    "Trained parameters", "Sharded replicas freeze parameters and skip unused ones, also after an evaluation."
)
@pytest.mark.soak
def test_sharded_replica_freezes_and_skips_unused_parameters(tmp_path: Path) -> None:
    """After an evaluation, too, and with a death in the step of the freeze."""
    sections = [["frozen", "hsdp"], ["double", "hsdp"]]
    outcome = run_world(
        "belonging.py", tmp_path / "run", 4, [sections], replica_size=2, kills=["3:1.1:in-reduce"]
    )
    assert outcome.code == 0, outcome.output
    assert outcome.survivors == [0, 1], outcome.output
    for rank in (0, 1):
        assert outcome.notes(rank, "frozen")[0]["error"] < 1e-6
        assert outcome.notes(rank, "double")[0]["error"] < 1e-12
