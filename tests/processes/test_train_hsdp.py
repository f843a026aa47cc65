"""`recover train parallel=hsdp`: the trainer on sharded replicas, with kills of single ranks, saved and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import Trained, check_lines, small_world, train

STEPS, BATCH = 12, 6


def hsdp(run_dir: Path, *words: str, kills: list[str] | None = None, resume: Path | None = None) -> Trained:
    if resume is None:
        words = (
            *small_world(run_dir.parent / "world"),
            f"steps={STEPS}",
            f"global_batch={BATCH}",
            "parallel=hsdp",
            "shard=2",
            "microbatch_size=4",
            "reduction=reproducible",
            "checkpoint.every=4",
            "eval.every=6",
            *words,
        )
    return train(run_dir, *words, kills=kills or [], resume=resume)


@pytest.mark.guarantee(
    "Sharded replicas (HSDP)",
    "Sharded training has the same bits through deaths and a resume, and its checkpoint fits other shards "
    "and replicas.",
)
@pytest.mark.soak
@pytest.mark.usefixtures("every_checkpoint_is_awaited")
def test_hsdp_training_has_the_same_bits_through_deaths_and_a_resume(tmp_path: Path) -> None:
    """A rank dies before the vote, the writer's peer over a checkpoint; then too few are left, and the run is resumed:
    with the same shards (the same bits), with others, and unsharded (the same samples, and losses but for rounding).
    """
    calm = hsdp(tmp_path / "calm", "replicas=2")
    assert calm.code == 0, calm.output
    check_lines(calm, STEPS, BATCH)

    kills = ["3:1.1:vote", "8:0.1:checkpoint"]
    half = hsdp(tmp_path / "half", "replicas=3", "min_replicas=2", kills=kills)
    assert half.code == 3, half.output
    assert {tuple(i["dead_ranks"]) for i in half.incidents} == {(2, 3), (0, 1)}
    assert f"step-{half.steps[-1]['step']}" in half.checkpoints

    other = hsdp(tmp_path / "other", "replicas=1", "shard=4", "min_replicas=1", resume=half.run_dir)
    plain = hsdp(tmp_path / "plain", "replicas=2", "parallel=ddp", resume=half.run_dir)
    for run in (other, plain):
        assert run.code == 0, run.output
        expected = calm.steps[-len(run.steps) :]
        assert [line["data_digest"] for line in run.steps] == [line["data_digest"] for line in expected]
        losses = [line["loss"] for line in expected]
        assert [line["loss"] for line in run.steps] == pytest.approx(losses, rel=1e-5)

    whole = hsdp(half.run_dir, "replicas=1", "min_replicas=1", resume=half.run_dir)
    assert whole.code == 0, whole.output
    check_lines(whole, STEPS, BATCH)
    assert whole.summary["parameters_digest"] == calm.summary["parameters_digest"]
    assert [line.get("heldout_loss") for line in whole.steps] == [
        line.get("heldout_loss") for line in calm.steps
    ]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["parallel=hsdp"], "add shard=2"),
        (["shard=2"], "shard=2 belongs to parallel=hsdp"),
        (["parallel=hsdp", "shard=2", "microbatch_size=3"], "make it a multiple, as microbatch_size=2"),
    ],
)
def test_hsdp_training_refuses_settings_that_do_not_fit(
    tmp_path: Path, words: list[str], complaint: str
) -> None:
    run = train(tmp_path / "run", *small_world(tmp_path), *words)
    assert run.code == 2
    assert complaint in run.output
