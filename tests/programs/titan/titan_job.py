"""Configs of torchtitan for tests: debug models that run on a CPU, with a tokenizer and texts that the test has made.

`--config titan_job.llama3` under ReCoVer, `--module titan_job --config llama3` for torchtitan alone.
"""

from __future__ import annotations

import os
from dataclasses import fields, is_dataclass
from typing import Any

import titan_on_cpu  # noqa: F401  (before torchtitan)
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.trainer import Trainer

BATCH, LENGTH = 4, 32  # sequences of a step; tokens of each


def _small(config: Trainer.Config) -> Trainer.Config:
    place = os.environ["TITAN_ASSETS"]
    for layer in config.model_spec.model.layers:  # type: ignore[union-attr]
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.hf_assets_path = place
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=f"{place}/texts")
    training = config.training
    training.local_batch_size, training.seq_len, training.global_batch_size = 1, LENGTH, BATCH
    training.steps, training.max_norm = 20, 1e9
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    config.lr_scheduler.total_steps = 20
    config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = None
    config.validator.enable = False
    config.debug.seed, config.debug.enable_structured_logging = 0, False
    config.checkpoint = CheckpointManager.Config(interval=10, last_save_model_only=False, keep_latest_k=0)
    config.metrics.disable_color_printing = True
    return config


def llama3() -> Trainer.Config:
    config = llama3_debugmodel()
    assert isinstance(config.loss, ChunkedLossWrapper.Config)  # its backward runs chunk by chunk
    return _small(config)


def moe() -> Trainer.Config:
    """Two layers of 8 experts, instead of 8 of 64."""
    config = qwen3_moe_debug()
    model = config.model_spec.model  # type: ignore[union-attr]
    del model.layers[2:]
    _set(model, num_experts={64: 8}, out_features={64: 8}, top_k={8: 2})
    return _small(config)


def _set(config: Any, **values: dict[int, int]) -> None:
    """Replace values of fields of these names, at any depth."""
    for each in config if isinstance(config, list) else [config]:
        for name in (field.name for field in fields(each)) if is_dataclass(each) else ():
            value = getattr(each, name)
            if name in values and isinstance(value, int):
                setattr(each, name, values[name].get(value, value))
            _set(value, **values)
