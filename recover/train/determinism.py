"""Deterministic kernels: asking torch for them, operations that have none, and the environment that bits depend
on."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

import recover
from recover.job.machine import processor
from recover.train.engine import Batch, Engine
from recover.world.world import World


def use_deterministic_kernels() -> None:
    """Use deterministic kernels. Where torch has none it warns, and the run reports it at the start."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_cudnn_sdp(False)


def nondeterministic_operations(engine: Engine, batch: Batch) -> list[str]:
    """The operations without a deterministic kernel, from the warnings of torch in one microbatch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.rehearse(batch)
    return [str(w.message).partition(" ")[0] for w in caught if "deterministic" in str(w.message)]


def environment(
    step: recover.Step, world: World, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, Any]:
    """Everything besides the configuration that the bits of a run depend on, for comparisons of runs."""
    kind = {name: optimizer.defaults.get(name) for name in ("foreach", "fused")}
    return {
        "torch": torch.__version__,
        "processor": torch.cuda.get_device_name() if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "optimizer": f"{type(optimizer).__name__} {kind}",
        "replica_size": world.grid.replica_size,
        **step.numerics,
    }
