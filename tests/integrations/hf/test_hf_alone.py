"""Hugging Face's Trainer on ReCoVer, in a world of one, against the trainer alone: losses, gradient norms, learning
rates and counters of the same settings."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "programs" / "hf"))
from hf_parts import Endless, PlainLoss, Rows, arguments, mean_loss, model, padded

from recover.integrations.hf import Trainer

KEYS = ("step", "epoch", "loss", "grad_norm", "learning_rate", "eval_loss", "num_input_tokens_seen")


def sum_over_items(outputs: Any, labels: Any, num_items_in_batch: Any) -> torch.Tensor:
    return mean_loss(outputs.logits[:, :-1], labels[:, 1:]) * (labels[:, 1:] >= 0).sum() / num_items_in_batch


def half_masked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Many microbatches have no token with a label."""
    batch = padded(rows)
    batch["labels"][batch["input_ids"][:, 0] < 40] = -100
    return batch


def history(
    kind: Any, place: Path, settings: dict[str, Any], resume: str | None = None, **parts: Any
) -> tuple[list[dict[str, Any]], Any]:
    usual: dict[str, Any] = {"model": model, "train_dataset": Rows, "eval_dataset": partial(Rows, 1000, 11)}
    made = {name: make() for name, make in (usual | parts).items() if name in usual}
    functions = {"data_collator": padded} | {name: part for name, part in parts.items() if name not in usual}
    trainer = kind(args=arguments(place, max_steps=12, **settings), **made, **functions)
    trainer.train(resume_from_checkpoint=resume)
    return [{name: entry.get(name) for name in KEYS} for entry in trainer.state.log_history], trainer


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"include_num_input_tokens_seen": "all", "eval_strategy": "epoch"}, {}),
        ({"train_sampling_strategy": "sequential", "logging_steps": 4}, {}),
        ({"train_sampling_strategy": "group_by_length", "max_grad_norm": 0.0}, {}),
        ({"train_sampling_strategy": "batch_rebalance"}, {}),
        ({"dataloader_drop_last": True, "per_device_train_batch_size": 4, "dataloader_num_workers": 2}, {}),
        ({"label_smoothing_factor": 0.1, "weight_decay": 0.1}, {}),
        (
            {"gradient_checkpointing": True, "data_seed": 3, "eval_on_start": True, "eval_strategy": "steps"},
            {},
        ),
        ({"accelerator_config": {"use_seedable_sampler": False}}, {}),
        ({"optim": "adafactor", "lr_scheduler_type": "constant"}, {}),
        ({}, {"model": PlainLoss}),
        ({}, {"compute_loss_func": sum_over_items}),
        ({}, {"data_collator": half_masked}),
        ({}, {"train_dataset": Endless}),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2}
            | {"metric_for_best_model": "loss", "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0}},
            {},
        ),
    ],
)
def test_losses_are_those_of_the_trainer_alone(
    tmp_path: Path, settings: dict[str, Any], parts: dict[str, Any]
) -> None:
    expected, alone = history(transformers.Trainer, tmp_path / "alone", settings, **parts)
    found, ours = history(Trainer, tmp_path / "ours", settings, **parts)
    assert [entry["step"] for entry in found] == [entry["step"] for entry in expected]
    for name in KEYS:
        values = [entry[name] for entry in found], [entry[name] for entry in expected]
        assert values[0] == [
            None if value is None else pytest.approx(value, rel=1e-5, abs=1e-12) for value in values[1]
        ], name
    assert ours.state.total_flos == alone.state.total_flos


def test_bfloat16_keeps_the_losses_to_its_own_precision(tmp_path: Path) -> None:
    """The trainer divides by the tokens of the step before backward, ReCoVer after it: bf16 rounds differently."""
    expected, _ = history(transformers.Trainer, tmp_path / "alone", {"bf16": True})
    found, _ = history(Trainer, tmp_path / "ours", {"bf16": True})
    losses = [entry["loss"] for entry in expected]
    assert [entry["loss"] for entry in found] == [loss and pytest.approx(loss, rel=1e-2) for loss in losses]


@pytest.mark.parametrize("seedable", [True, False])
def test_resumed_run_has_the_order_of_the_epoch_that_it_left(tmp_path: Path, seedable: bool) -> None:
    """In the middle of the second epoch. The trainer alone loses an order that was drawn from the global generator."""
    settings = {"accelerator_config": {"use_seedable_sampler": seedable}}
    saving = {"save_strategy": "steps", "save_steps": 7}
    expected, _ = history(Trainer, tmp_path, {**settings, **saving})
    found, trainer = history(Trainer, tmp_path, settings, resume=str(tmp_path / "checkpoint-7"))
    assert [entry["loss"] for entry in found] == [entry["loss"] for entry in expected]
    assert trainer.recovery.index == 12


def test_checkpoint_that_is_there_already_is_replaced(tmp_path: Path) -> None:
    """As the successor of a writer does if the writer died after it had written."""
    _, trainer = history(Trainer, tmp_path, {"save_strategy": "steps", "save_steps": 12})
    before = (tmp_path / "checkpoint-12" / "trainer_state.json").stat().st_ino
    trainer._save_checkpoint(trainer.model, None)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-12"]
    assert (tmp_path / "checkpoint-12" / "trainer_state.json").stat().st_ino != before
    assert (tmp_path / "checkpoint-12" / "recover.json").is_file()


def test_checkpoint_that_cannot_be_written_ends_only_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Trainer, "_save_rng_state", full)
    with pytest.raises(OSError, match="no space left"):
        history(Trainer, tmp_path, {"save_strategy": "steps", "save_steps": 5})
    said = capsys.readouterr().out
    assert [
        f"checkpoint-{step} failed (no space left on device); training continues" in said for step in (5, 10)
    ] == [
        True,
        True,
    ]
    assert "'epoch': '2.48'" in said  # step 12
