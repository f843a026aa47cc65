"""torchtitan for `recover bench titan`: configs, and a program that trains as `python -m torchtitan.train` does.

It appends a line to TITAN_OUT/steps-PID.jsonl for each step that torchtitan logs, and writes its process id to
TITAN_OUT/pid-REPLICA, so that the benchmark can kill it. TITAN_DEVICE is cpu or cuda.
"""

from __future__ import annotations

import functools
import json
import os
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import titan_on_cpu  # type: ignore[import-not-found]  # before torchtitan
import torch
from torch.nn.attention.flex_attention import flex_attention
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import ConfigManager
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

ON_CPU = titan_on_cpu.ON_CPU
ASSETS = os.environ["TITAN_ASSETS"]
NAME, _, PRECISION = os.environ["TITAN_MODEL"].partition("_")
FLAVOR = {"debug": "debugmodel", "1b": "1B"}[NAME]
ATTENTION = "sdpa" if ON_CPU else os.environ.get("TITAN_ATTENTION", "flex")


def job() -> Trainer.Config:
    """TITAN_MODEL, with torchtitan's defaults but for the data, and without a GPU but for attention."""
    if ATTENTION.startswith("flex"):  # tuning the kernels of flex attention takes minutes in each launch
        tuned = ("max_autotune", "coordinate_descent_tuning")
        options: Any = FlexAttention.inductor_configs | dict.fromkeys(tuned, False)
        FlexAttention.inductor_configs = options
        FlexAttention._compiled_flex_attn = torch.compile(flex_attention, options=options)
    config = llama3_debugmodel()
    attention = {} if ATTENTION == "sdpa" else {"attn_backend": ATTENTION}
    float8 = [Float8LinearConverter.Config()] if PRECISION == "float8" else None
    config.model_spec = spec = model_registry(FLAVOR, converters=float8, **attention)
    config.loss.loss_fn.global_vocab_size = decoder_vocab_size(spec)
    _set_attention(spec)
    if ON_CPU:
        config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"  # the default needs torch 2.15
    config.hf_assets_path = ASSETS
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=f"{ASSETS}/texts")
    config.validator.enable, config.activation_checkpoint = False, None
    config.training.disable_cuda_graphs, config.debug.enable_structured_logging = True, False
    config.checkpoint = CheckpointManager.Config(last_save_model_only=False, keep_latest_k=2)
    config.metrics.disable_color_printing, config.debug.seed = True, 0
    return config


def _set_attention(spec: Any) -> None:
    """sdpa needs neither compilation nor packages; the registry refuses it, since it ignores limits of documents."""
    if ATTENTION == "sdpa":
        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()


def torchft() -> Trainer.Config:
    """The same on torchtitan's trainer for torchft: synchronous, by its defaults."""
    from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
    from torchtitan.experiments.torchft.config.job_config import FaultTolerance
    from torchtitan.experiments.torchft.llama3 import model_registry as ft_registry
    from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer
    from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer

    plain: Any = job()
    values = {each.name: getattr(plain, each.name) for each in fields(plain)}
    values["model_spec"] = ft_registry(FLAVOR)
    _set_attention(values["model_spec"])
    values["loss"] = plain.loss.loss_fn  # torchft's trainer does not know the chunked loss
    groups = plain.optimizer.param_groups
    values["optimizer"] = TorchFTOptimizersContainer.Config(param_groups=groups)
    values["checkpoint"] = TorchFTCheckpointManager.Config(last_save_model_only=False)
    values["fault_tolerance"] = FaultTolerance(
        enable=True, process_group="gloo" if ON_CPU else "nccl", semi_sync_method=None
    )
    return FaultTolerantTrainer.Config(**values)


def train() -> None:
    out = Path(os.environ["TITAN_OUT"])
    out.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = {}
    log = MetricsProcessor.log

    @functools.wraps(log)
    def noted(
        self: Any, step: int, loss: float, largest: float, norm: float, extra_metrics: Any = None
    ) -> None:
        line = {"at": time.time(), "step": step, "loss": loss, "norm": norm, **_size(known.get("trainer"))}
        with open(out / f"steps-{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        log(self, step, loss, largest, norm, extra_metrics)

    MetricsProcessor.log = noted
    ranks = ("RECOVER_RANK", "TITAN_REPLICA", "RANK")
    replica = next((os.environ[name] for name in ranks if name in os.environ), "unknown")
    (out / f"pid-{replica}.new").write_text(str(os.getpid()))
    (out / f"pid-{replica}.new").rename(out / f"pid-{replica}")
    init_logger()
    known["trainer"] = trainer = ConfigManager().parse_args().build()
    assert isinstance(trainer.optimizers, OptimizersContainer)
    trainer.train()
    trainer.close()


def _size(trainer: Any) -> dict[str, int]:
    """Replicas that took part in a step, and its sequences."""
    training = trainer.config.training
    if hasattr(trainer, "recovery"):
        sequences = len(trainer.recovery.all_samples) * training.local_batch_size
        return {"replicas": len(trainer.world.replicas), "sequences": sequences}
    if hasattr(trainer, "ft_manager"):
        replicas = trainer.ft_manager.manager.num_participants()
        each = training.local_batch_size * trainer.gradient_accumulation_steps
        return {"replicas": replicas, "sequences": replicas * each}
    return {"replicas": int(os.environ["WORLD_SIZE"]), "sequences": training.global_batch_size}


if __name__ == "__main__":
    train()
