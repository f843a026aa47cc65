"""Deterministic kernels: asking torch for them, and operations that have none."""

from __future__ import annotations

import os
import warnings

import torch

from recover.train.engine import Batch, Engine


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
