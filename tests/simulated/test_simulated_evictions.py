"""`recover.Step` on a simulated world whose replicas hold different state: evicted replicas, and the reported
reasons."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from simulated_training import Training

import recover
from recover.checkpoint import directory
from recover.runs.writing.run_records import incident_line

REASONS = {
    6: "learning rate 0.005, the others have 0.009000000000000001",
    5: "its parameters differ from the majority, first in inner.weight",
    4: "its buffers differ from the majority, first in average",
    3: "its optimizer state differs from the majority, first in exp_avg of outer.bias",
    2: "it trains other parameters than the majority, first in inner.bias",
}


def _change(rank: int, step: recover.Step) -> None:
    """Change the state of one replica after each step, each in another way."""
    state = step.state()
    model, optimizer = state.model, state.optimizer
    parameters = dict(model.named_parameters())
    if step.index == 4:
        step.compare_optimizers()
    match rank, step.index:
        case 6, 1:
            optimizer.param_groups[0]["lr"] = 0.005
        case 5, 2:
            parameters["inner.weight"].data = parameters["inner.weight"].data.flip(0)
        case 4, 3:
            model.get_buffer("average")[3] += 1
        case 3, 4:
            optimizer.state[parameters["outer.bias"]]["exp_avg"][0] += 1
        case 2, 5:
            parameters["inner.bias"].requires_grad_(False)


@pytest.mark.guarantee(
    "State and samples",
    "The evicted replica, its peers, `recover why`, the page and `incidents.jsonl` name the entry that "
    "differs.",
)
def test_eviction_of_each_kind_states_its_reason_to_all_replicas() -> None:
    training = Training(7, between=_change)
    assert training.run().finished == {0: "done", 1: "done"}
    for rank, reason in REASONS.items():
        assert training.last_words[rank].startswith(f"rank {rank} was evicted: {reason};")
    assert [incident.reasons for incident in training.incidents] == [
        {rank: reason} for rank, reason in REASONS.items()
    ]
    assert [incident.step for incident in training.incidents] == [2, 3, 4, 5, 6]
    written = [incident_line(incident, (), True) for incident in training.incidents]
    assert [line["evicted"] for line in written] == [{str(rank): why} for rank, why in REASONS.items()]


@pytest.mark.guarantee(
    "Joining",
    "Joined replicas that lack part of the state are evicted, and never evict the replica that held it.",
)
@pytest.mark.parametrize("saved", [False, True])
def test_joined_replicas_do_not_evict_the_original_replica(saved: bool, tmp_path: Path) -> None:
    """The joined replicas lack a change that the original's loop makes. If a save has found all replicas equal before,
    no majority can decide which state is right."""
    changed: list[int] = []

    def between(rank: int, step: recover.Step) -> None:
        if saved and step.index == 14:
            step.compare_optimizers()
        if rank == 0 and step.index == 16:
            assert step.world.replicas == (0, 3, 4)
            changed.append(step.index)
            step.state().optimizer.param_groups[0]["lr"] = 0.5

    kills, joins = {1: 60, 2: 70}, {3: 0, 4: 5}
    training = Training(3, 2, kills, joins, steps=18, between=between, run_dir=str(tmp_path))
    outcome = training.run().finished
    assert changed
    if not saved:
        assert outcome == {0: "done"}
        for rank in (3, 4):
            assert "learning rate" in training.last_words[rank]
            assert "the others have 0.5" in training.last_words[rank]
        return
    assert outcome.keys() == {0, 3, 4}
    assert len(set(outcome.values())) == 1, "all are told the same"
    told = outcome[0]
    assert told.startswith(
        "before step 17 replica 0 and replicas 3, 4 hold different states (learning rate is "
    )
    assert "and 0.5 on replica 0)" in told
    assert "replicas 3, 4 joined later and got their state from the others" in told
    assert "unconfirmed-16-replica-0 (replica 0), unconfirmed-16-replica-3 (replicas 3, 4)" in told
    states = directory.undecided(tmp_path)
    assert [found.path.name for found in states] == ["unconfirmed-16-replica-0", "unconfirmed-16-replica-3"]
    for found in states:
        found.verify()
    assert torch.equal(*(_weights(found.path) for found in states)), "they differ in the learning rate alone"


def _weights(path: Path) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(str(path / "part-0.safetensors"), framework="pt") as file:
        return file.get_tensor("model.inner.weight")
