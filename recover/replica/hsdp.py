"""HSDP: a replica whose ranks each hold a shard of parameters, gradients and optimizer state (torch's FSDP2).

Sharding stays inside the replica; across replicas the step reduces local shards, each in the group of its shard.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from recover.replica.group import init_replica_world
from recover.step.inside import mark
from recover.world.world import World


class ShardedReplica:
    """Ranks that share the rows of every microbatch and hold a shard each."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._device = device

    def combine(self, values: torch.Tensor) -> torch.Tensor:
        total = values.to(self._device)
        dist.all_reduce(total)
        return total.to(values.device)


def hsdp(
    model: torch.nn.Module,
    world: World,
    *,
    blocks: Iterable[torch.nn.Module] | None = None,
    param_dtype: torch.dtype | None = None,
    checkpoint_activations: bool = False,
) -> torch.nn.Module:
    """Shard `model` over the ranks of this replica, in place, and return it.

    blocks:                  modules that are gathered one at a time; by default the members of its ModuleLists
    param_dtype:             what forward and backward compute in (bfloat16, say); gradients are summed in float32
    checkpoint_activations:  forget the activations inside blocks and compute them again in backward
    """
    device = next(model.parameters()).device
    init_replica_world(world, device)
    chosen = list(blocks) if blocks is not None else _blocks(model)
    if checkpoint_activations:
        apply_activation_checkpointing(model, check_fn=lambda module: module in chosen)
        chosen = [
            module
            for module in model.modules()
            if getattr(module, "_checkpoint_wrapped_module", None) in chosen
        ]
    mesh = init_device_mesh(device.type, (world.grid.replica_size,), mesh_dim_names=("shard",))
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for block in [*chosen, model]:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    assert isinstance(model, FSDPModule)
    # Rows are shared equally, so the mean over the ranks is the mean over the microbatch: torch's own divisor, the
    # number of shards, is right, and it never changes. B is the step's.
    mark(model, ShardedReplica(world.grid.replica_size, device))
    return model


def _blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [
        block for module in model.children() if isinstance(module, torch.nn.ModuleList) for block in module
    ]
