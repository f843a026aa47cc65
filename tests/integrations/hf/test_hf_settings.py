"""Settings and trainers that Hugging Face's Trainer on ReCoVer refuses, and with which words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch.utils.data import IterableDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "programs" / "hf"))
from hf_parts import Endless, Rows, arguments, model, padded

from recover.integrations.hf import Trainer, compatibility, recoverable
from recover.integrations.hf.compatibility import SIGNATURES, check_trainer, obstacles


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("fp16", True, "a scaled gradient would be applied unscaled (fp16 is True); set bf16=True instead"),
        ("fsdp", ["full_shard"], "(fsdp is ['full_shard']); leave fsdp out, or use torchtitan with FSDP2"),
        ("deepspeed", "ds.json", "(deepspeed is ds.json); leave it out"),
        ("parallelism_config", "tp=2", "(parallelism_config is tp=2); leave it out"),
        ("auto_find_batch_size", True, "(auto_find_batch_size is True); set per_device_train_batch_size"),
        ("enable_jit_checkpoint", True, "SIGTERM is handled by `recover run`"),
        ("save_on_each_node", True, "(save_on_each_node is True); leave it out"),
        ("output_dir", "s3://b/x", "a local directory (output_dir is s3://b/x); give a directory, and copy"),
        ("optim", "lomo", "(optim is lomo); use adamw_torch"),
        ("optim", "galore_adamw_layerwise", "(optim is galore_adamw_layerwise); use adamw_torch"),
        ("optim", "schedule_free_adamw", "(optim is schedule_free_adamw); use adamw_torch"),
    ],
)
def test_setting_that_cannot_work_is_refused_with_the_remedy(
    tmp_path: Path, name: str, value: Any, complaint: str
) -> None:
    args = arguments(tmp_path)
    assert list(obstacles(args, 1)) == []
    object.__setattr__(args, name, value)
    (said,) = obstacles(args, 1)
    assert complaint in said
    with pytest.raises(ValueError, match=r"transformers\.Trainer on ReCoVer: "):
        Trainer(model=model(), args=args, train_dataset=Rows(), data_collator=padded)


def test_checkpoint_in_object_storage_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(model=model(), args=arguments(tmp_path), train_dataset=Rows(), data_collator=padded)
    with pytest.raises(ValueError, match=r"resumes from a local directory .*s3://b/checkpoint-5\); copy"):
        trainer.train(resume_from_checkpoint="s3://b/checkpoint-5")


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_variables_of_accelerate_that_shard_the_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    name = "is_fsdp_enabled" if variable.endswith("FSDP") else "is_deepspeed_enabled"
    create = Trainer.create_accelerator_and_postprocess

    def created(self: Any) -> None:
        create(self)
        setattr(self, name, True)

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", created)
    with pytest.raises(ValueError, match=f"{variable}.*unset them"):
        Trainer(model=model(), args=arguments(tmp_path), train_dataset=Rows(), data_collator=padded)


def test_batches_that_one_process_reads_for_all_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, accelerator_config={"dispatch_batches": True})
    assert "dispatches or splits batches" in next(obstacles(args, 1))


def test_replica_of_several_ranks_is_refused(tmp_path: Path) -> None:
    assert "(--replica-size is 2); leave --replica-size out" in next(obstacles(arguments(tmp_path), 2))


class Counted(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Rows())

    def __len__(self) -> int:
        return len(Rows())


def train(kind: Any, place: Path, data: Any = None, **settings: Any) -> None:
    args = arguments(place, **{"max_steps": 2, **settings})
    kind(model=model(), args=args, train_dataset=data or Rows(), data_collator=padded).train()


def test_iterable_with_epochs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a dataset with __getitem__, or an iterable without a length"):
        train(Trainer, tmp_path, Counted())


def test_search_of_hyperparameters_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(model=model(), args=arguments(tmp_path), train_dataset=Endless(), data_collator=padded)
    with pytest.raises(ValueError, match="start a job for each trial"):
        trainer.train(trial={"learning_rate": 1.0})


class Talks(transformers.Trainer):
    def compute_loss(self, *args: Any, **named: Any) -> Any:
        self.log({"talk": 1.0})
        return super().compute_loss(*args, **named)


def test_log_inside_a_microbatch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"trainer\.log was called inside the loop over microbatches"):
        train(recoverable(Talks), tmp_path)


class Doubled(transformers.Trainer):
    """A trainer of the user, whose training_step sees microbatches."""

    rows: list[int]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.rows = [*getattr(self, "rows", []), len(inputs["input_ids"])]
        return super().training_step(model, inputs, num_items_in_batch)


def test_training_step_of_a_subclass_is_called_for_each_microbatch(tmp_path: Path) -> None:
    kind = recoverable(Doubled)
    assert kind is recoverable(Doubled)
    assert issubclass(kind, Doubled)
    trainer = kind(
        model=model(), args=arguments(tmp_path, max_steps=2), train_dataset=Rows(), data_collator=padded
    )
    trainer.train()
    assert trainer.rows == [2] * 12


def test_training_step_over_whole_steps_is_refused() -> None:
    with pytest.raises(TypeError, match=r"use recoverable\(Mine\)"):
        type("Mine", (Trainer,), {"training_step": Doubled.training_step})


def test_trainer_with_its_own_loop_is_refused() -> None:
    own = type("Own", (transformers.Trainer,), {"_run_epoch": lambda self: None})
    with pytest.raises(TypeError, match="Own has its own _run_epoch"):
        recoverable(own)


@pytest.mark.parametrize("name", [*SIGNATURES])
def test_method_with_other_parameters_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(transformers.Trainer, name, lambda self, another: None)
    with pytest.raises(
        RuntimeError, match=rf"{name}\(self another\) of transformers .* install transformers"
    ):
        check_trainer(transformers.Trainer)


def test_method_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(transformers.Trainer, "_clip_grad_norm")
    with pytest.raises(RuntimeError, match=r"_clip_grad_norm\(there is none\)"):
        check_trainer(transformers.Trainer)


def test_untested_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(compatibility.logger, "warning", said.append)
    check_trainer(transformers.Trainer)
    assert said == []
    monkeypatch.setattr(compatibility, "TESTED", ("5.0.0",))
    check_trainer(transformers.Trainer)
    assert said == [
        f"recover.integrations.hf was tested with transformers 5.0.0, not {transformers.__version__}"
    ]
