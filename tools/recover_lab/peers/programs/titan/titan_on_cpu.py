"""Lets torchtitan 0.3.0 run on a CPU with torch 2.13, with ReCoVer and without. Import it before torchtitan.

It changes nothing where TITAN_DEVICE is cuda.
"""

from __future__ import annotations

import os
import types

import torch
import torch.distributed as dist
import torchtitan.tools.utils as utils
from torch.distributed.fsdp import FSDPModule

ON_CPU = os.environ.get("TITAN_DEVICE", "cpu") == "cpu"
CPU = types.SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    device_count=lambda: 1,
    synchronize=lambda *_: None,
    get_device_name=lambda *_: "cpu",
    get_device_properties=lambda *_: types.SimpleNamespace(total_memory=1 << 34),
    reset_peak_memory_stats=lambda *_: None,
    empty_cache=lambda: None,
    memory_stats=lambda *_: {},
    memory_allocated=lambda *_: 0,
)
_divide = FSDPModule.set_gradient_divide_factor


def _sum_without_factor(module: FSDPModule, factor: float) -> None:
    """Gloo has no sum that multiplies first."""
    _divide(module, factor)
    module.set_force_sum_reduction_for_comms(True)


if ON_CPU:
    torch.set_num_threads(1)
    utils.device_type, utils.device_module = "cpu", CPU
    utils.get_local_device = lambda: torch.device("cpu")
    FSDPModule.set_gradient_divide_factor = _sum_without_factor  # type: ignore[assignment]
if not hasattr(dist, "set_timeout"):
    setattr(dist, "set_timeout", lambda *_: None)  # noqa: B010  (new in torch 2.15; torchtitan calls it after its first step)
