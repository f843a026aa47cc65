"""Facts that the bits of a run depend on besides its configuration: for `environment.json` and comparisons."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from recover.gradients.optimizers import optimizers_of
from recover.job import code, process
from recover.job.machine import processor
from recover.world.world import World


class SummingStep(Protocol):
    @property
    def numerics(self) -> dict[str, Any]: ...


def environment(step: SummingStep, world: World, optimizer: Any, device: torch.device) -> dict[str, Any]:
    """The facts of a run of `recover train`, or of a script."""
    first = optimizers_of(optimizer)[0]
    kind = {name: first.defaults.get(name) for name in ("foreach", "fused")}
    return {
        "torch": torch.__version__,
        "processor": torch.cuda.get_device_name() if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "optimizer": f"{type(first).__name__} {kind}",
        "replica_size": world.grid.replica_size,
        **step.numerics,
    }


def script_facts() -> dict[str, Any]:
    """How a script was started, and the code of the user that it has loaded by now."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "script": {"command": list(process.given_command), "directory": process.given_directory},
        "code": {name: list(each) for name, each in code.loaded.items() if each.path},
    }
