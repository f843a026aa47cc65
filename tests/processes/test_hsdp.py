"""Sharded replicas: one rank lost is a replica lost, at once and as a unit, and the others go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toy_llama import CONFIG, Tokens, real, reference, reference_gradients
from worlds import Outcome, run_world

from recover.train.models import Llama


def train(tmp_path: Path, replicas: int, kills: list[str], name: str = "run", **options: Any) -> Outcome:
    options = {"accum": 2, "steps": 6, **options}
    return run_world("sharded.py", tmp_path / name, 2 * replicas, [options], replica_size=2, kills=kills)


def check(outcome: Outcome, lost: set[int], batch: int, steps: int = 6, several: str = "") -> None:
    """Exactly B in every step, the same bits in every replica's shard, peers and losses agree, no other rank lost."""
    assert outcome.code == 0, outcome.output
    survivors = [rank for rank in outcome.diaries if rank // 2 not in lost]
    assert outcome.survivors == survivors, outcome.output
    for step in range(1, steps + 1):
        healthy = [rank for rank in outcome.diaries if outcome.ends.get(rank) != "excluded"]
        entries = {r: c for r in healthy for c in outcome.notes(r, "commit") if c["step"] == step}
        assert {entry["weight"] for entry in entries.values()} == {batch}
        for shard in (0, 1):
            digests = {entry["digest"] for rank, entry in entries.items() if rank % 2 == shard}
            assert len(digests) == 1, f"step {step}, shard {shard}: {digests}"
        assert len({(entry["loss"], entry["norm"]) for entry in entries.values()}) == 1
    losses, norms, parameters = reference(steps, batch, several)
    first = survivors[0]
    torch.testing.assert_close(
        [c["loss"] for c in outcome.notes(first, "commit")], losses, rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        [c["norm"] for c in outcome.notes(first, "commit")], norms, rtol=1e-4, atol=1e-6
    )
    for name, values in outcome.notes(first, "end")[0]["sample"].items():
        torch.testing.assert_close(torch.tensor(values), parameters[name].flatten()[:8], rtol=1e-4, atol=2e-5)


def check_memory(outcome: Outcome) -> None:
    """Each rank holds its shard of parameters, gradients and optimizer state, and no more."""
    total = sum(p.numel() for p in Llama(CONFIG).parameters())
    padding = 64 * len(list(Llama(CONFIG).parameters()))
    for rank in outcome.survivors:
        memory = outcome.notes(rank, "memory")[0]
        assert total / 2 - padding <= memory["parameters"] <= total / 2 + padding
        assert memory["buckets"] == memory["parameters"]
        assert memory["optimizer"] == 2 * memory["parameters"]


@pytest.mark.guarantee("State and samples", "Drift in any shard evicts the whole replica.")
@pytest.mark.guarantee(
    "Sharded replicas (HSDP)",
    "Any rank of a replica may die anywhere; its peers exit with it, and the others commit B microbatches.",
)
@pytest.mark.guarantee(
    "Sharded replicas (HSDP)",
    "The accumulation calls of a user's loop (`no_sync()`, `set_requires_gradient_sync()`) change nothing.",
)
def test_hsdp_rank_may_die_anywhere(tmp_path: Path) -> None:
    """And a bit may flip on any of them."""
    outcome = train(tmp_path, 4, ["2:1.1:vote", "3:3.1:advance=corrupt:weights", "5:0.0:in-reduce"])
    check(outcome, {0, 1, 3}, batch=8)
    assert outcome.ends[1] == "orphan"
    assert outcome.ends[2] == "orphan"
    assert (outcome.ends[6], outcome.ends[7]) == ("excluded", "excluded")


@pytest.mark.guarantee(
    "Sharded replicas (HSDP)",
    "Several optimizers on sharded parameters, each group clipped by its norm over all shards, match one process.",
)
@pytest.mark.soak  # tests/pure/test_several_optimizers.py shows the same without shards
def test_several_optimizers_of_sharded_replicas_match_one_process(tmp_path: Path) -> None:
    outcome = train(tmp_path, 2, ["3:1.1:in-reduce"], several="SGD", accum=3, steps=4)
    check(outcome, {1}, batch=6, steps=4, several="SGD")


@pytest.mark.guarantee(
    "Sharded replicas (HSDP)",
    "Several optimizers on sharded parameters, each group clipped by its norm over all shards, match one process.",
)
@pytest.mark.soak
def test_muon_of_sharded_replicas_follows_one_process(tmp_path: Path) -> None:
    """Muon multiplies in bfloat16, and the sums over shards round otherwise."""
    outcome = train(tmp_path, 2, ["3:1.1:in-reduce"], several="Muon", accum=3)
    assert outcome.survivors == [0, 1], outcome.output
    torch.manual_seed(3)
    start = {name: p.detach().flatten()[:8].clone() for name, p in Llama(CONFIG).named_parameters()}
    _, _, parameters = reference(6, 6, "Muon")
    sample = outcome.notes(0, "end")[0]["sample"]
    matrices = [name for name, p in parameters.items() if p.ndim == 2 and "embed" not in name]
    apart = torch.cat([torch.tensor(sample[name]) - parameters[name].flatten()[:8] for name in matrices])
    moved = torch.cat([parameters[name].flatten()[:8] - start[name] for name in matrices])
    assert apart.norm() < 0.2 * moved.norm()  # a Muon that looks at each shard alone has 0.37


@pytest.mark.guarantee(
    "Sharded replicas (HSDP)",
    "Any rank of a replica may die anywhere; its peers exit with it, and the others commit B microbatches.",
)
@pytest.mark.soak  # tests/simulated and the matrix show the same
@pytest.mark.parametrize("places", [("repair", "update"), ("bucket:1", "extra"), ("forward", "backward")])
def test_hsdp_ranks_of_two_replicas_may_die_together(tmp_path: Path, places: tuple[str, str]) -> None:
    first, second = places
    kills = [f"3:0.1:{first}", f"3:2.0:{second}"]
    if first == "repair":
        kills = ["3:0.1:in-reduce", f"3:2.0:{first}"]
    elif second == "extra":
        kills = ["3:2.0:bucket:1", "3:0.1:extra"]
    check(train(tmp_path, 3, kills), {0, 2}, batch=6)


@pytest.mark.guarantee(
    "Sharded replicas (HSDP)",
    "Sharded training has the same bits through deaths and a resume, and its checkpoint fits other shards "
    "and replicas.",
)
@pytest.mark.soak  # tests/processes/test_train_hsdp.py shows the same through the trainer
@pytest.mark.parametrize("bits", [64, 32])
def test_hsdp_bits_do_not_depend_on_failures(tmp_path: Path, bits: int) -> None:
    exact = {"reduction": "reproducible", "reduction_bits": bits, "tight": True}
    calm = train(tmp_path, 2, [], "calm", accum=3, **exact)
    stormy = train(tmp_path, 3, ["2:1.1:in-reduce", "4:0.0:backward"], "stormy", **exact)
    reruns = [[c["reruns"] for c in run.notes(rank, "commit")] for run, rank in ((calm, 0), (stormy, 4))]
    assert reruns[0] == reruns[1]
    assert reruns[0][0] == 1
    check(calm, set(), batch=6)
    check(stormy, {0, 1}, batch=6)
    assert stormy.notes(4, "end")[0]["digest"] == calm.notes(0, "end")[0]["digest"]


@pytest.mark.guarantee(
    "The trajectory",
    "Weights per microbatch and per rank give the mean over all tokens for HSDP, pipelines and expert "
    "groups, through deaths.",
)
@pytest.mark.guarantee(
    "Sharded replicas (HSDP)", "Each rank holds only its shard of parameters, gradients and optimizer state."
)
@pytest.mark.guarantee(
    "Sharded replicas (HSDP)",
    "Sharded gradients equal those of one process to 1e-6 before and after a death.",
)
@pytest.mark.guarantee("Sharded replicas (HSDP)", "A slow peer and a slow repair evict no rank.")
def test_hsdp_gradients_match_one_process_before_and_after_a_death(tmp_path: Path) -> None:
    """Gradients are the mean over all tokens that count; their number differs by rank. Clipping would hide the divisor.

    A slow peer in the step before, and a slow repair, evict no rank.
    """
    slow = {"slow_peer": 4.0, "slow_repair": 2.0}
    outcome = train(tmp_path, 3, ["3:1.0:in-reduce"], gradients=True, padded=True, steps=4, **slow)
    assert outcome.survivors == [0, 1, 4, 5], outcome.output
    check_memory(outcome)
    for step in (1, 2, 3, 4):
        expected = reference_gradients(step, batch=6, padded=True)
        told = {
            (c["weight"], c["loss"], c["norm"]) for r in outcome.survivors for c in commits(outcome, r, step)
        }
        assert len(told) == 1, told  # equal on all ranks: safe to branch on
        tokens = sum(real(Tokens(padded=True)[sample][1]) for sample in range(6 * step - 6, 6 * step))
        assert told.pop()[0] == tokens / 2  # the mean over the two ranks of a replica
        for rank in outcome.survivors:
            gradients = torch.load(tmp_path / "run" / f"gradients-{rank}-{step}.pt")
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-6)


def commits(outcome: Outcome, rank: int, step: int) -> list[dict[str, Any]]:
    return [entry for entry in outcome.notes(rank, "commit") if entry["step"] == step]


@pytest.mark.guarantee(
    "Sharded replicas (HSDP)",
    "The accumulation calls of a user's loop (`no_sync()`, `set_requires_gradient_sync()`) change nothing.",
)
@pytest.mark.guarantee("Sharded replicas (HSDP)", "A model wrapped in FSDP1 behaves like one in FSDP2.")
@pytest.mark.parametrize("use_orig_params", [True, pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.soak
def test_fsdp1_model_behaves_like_an_fsdp2_model(tmp_path: Path, use_orig_params: bool) -> None:
    outcome = train(tmp_path, 3, ["2:1.1:vote", "4:0.0:in-reduce:1"], fsdp1=use_orig_params)
    check(outcome, {0, 1}, batch=6)
    assert outcome.ends[1] == "orphan"
