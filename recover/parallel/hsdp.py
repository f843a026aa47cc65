"""HSDP: a replica whose ranks each hold a shard of parameters, gradients and optimizer state
(torch's FSDP2).

Sharding stays inside the replica; across replicas the step reduces local shards, each in the
group of its shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from recover.gradients.accumulation import ignore
from recover.gradients.replica_interface import Replica, mark
from recover.parallel.blocks import blocks_of, recompute_blocks, refuse_ties_across
from recover.parallel.gathering import gather_json
from recover.parallel.torch_world import init_replica_world
from recover.world import rank_exit

if TYPE_CHECKING:
    from recover.world.world import World


class ShardedReplica(Replica):
    """Ranks that share the rows of every microbatch and hold a shard each."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, modules: Iterable[FSDPModule] = ()
    ) -> None:
        self.size = group.size()
        self._group, self._device, self._modules = group, device, tuple(modules)
        self._gathered: tuple[list[str], list[str]] | None = None  # names of this rank, and of all

    def combine(self, values: torch.Tensor) -> torch.Tensor:
        total = values.to(self._device)
        dist.all_reduce(total, group=self._group)
        return total.to(values.device)

    def combine_max(self, values: list[int]) -> list[int]:
        largest = torch.tensor(values, device=self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        found: list[int] = largest.tolist()
        return found

    def names_of_all(self, names: list[str]) -> list[str]:
        if self.peers_hold_all_buffers:  # each rank holds a part of all parameters
            return names
        if self._gathered is None or self._gathered[0] != names:
            parts = gather_json(names, self._group)
            self._gathered = names, sorted({name for part in parts for name in part})
        return self._gathered[1]

    def reshard(self) -> None:
        for root in self._modules[
            :1
        ]:  # after a forward pass without backward, the outermost one stays gathered
            assert isinstance(root, torch.nn.Module)
            # Freezing meanwhile has changed the gathered parameter: copy requires_grad to its
            # shard.
            gathered = {n: p.requires_grad for n, p in root.named_parameters() if not _is_shard(p)}
            for module in self._modules:
                module.reshard()
            for name, parameter in root.named_parameters() if gathered else ():
                parameter.requires_grad_(gathered.get(name, parameter.requires_grad))

    def knows(self, parameter: torch.nn.Parameter) -> bool:
        return not self._modules or _is_shard(parameter)


def _is_shard(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "_local_tensor")


def hsdp(
    model: torch.nn.Module,
    world: World,
    *,
    blocks: Iterable[torch.nn.Module] | None = None,
    param_dtype: torch.dtype | None = None,
    checkpoint_activations: bool = False,
    mesh: DeviceMesh | None = None,
) -> torch.nn.Module:
    """Shard `model` over the ranks of this replica, in place, and return it.

    blocks:                  modules that are gathered one at a time; by default the members of its ModuleLists, at any
                             depth. Their number is reported
    param_dtype:             type in which forward and backward compute (bfloat16, say); gradients are summed
                             in float32 (those of float64 parameters in float64)
    checkpoint_activations:  forget the activations inside blocks and compute them again in backward
    mesh:                    one dimension of the replica's ranks, if there is one already; no group of it may
                             span replicas
    """
    device = next(model.parameters()).device
    if mesh is None:
        init_replica_world(world, device)
        mesh = init_device_mesh(device.type, (world.grid.replica_size,), mesh_dim_names=("shard",))
    chosen = list(blocks) if blocks is not None else blocks_of(model)
    refuse_ties_across(model, chosen)
    if checkpoint_activations:
        chosen = recompute_blocks(model, chosen)
    for block in [*chosen, model]:
        double = any(p.dtype == torch.float64 for p in block.parameters())
        reduce = torch.float64 if double else torch.float32
        fully_shard(
            block, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce)
        )
    assert isinstance(model, FSDPModule)
    # Rows are shared equally, so the mean over the ranks is the mean over the microbatch: torch's
    # own divisor, the number of shards, is right, and it never changes. The step divides by the weight of
    # all microbatches.
    gathered = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in gathered:  # every microbatch leaves its gradient in the shards, to be counted
        ignore(module, "set_requires_gradient_sync")
    mark(model, ShardedReplica(mesh.get_group(), device, gathered))
    _report_units(model, world, len(gathered), mesh.size())
    return model


def _report_units(model: torch.nn.Module, world: World, units: int, ranks: int) -> None:
    """Log how much is gathered at a time: it decides the memory, and nothing else shows it."""
    text = f"{type(model).__name__} is sharded over {ranks} rank(s) in {units} unit(s) that are gathered one at a time"
    if units == 1:
        text += ": no ModuleList was found in it, so all of it is gathered at once; name its blocks with blocks=[...]"
    rank_exit.log(text)
    if world.rank == world.members[0]:
        print(f"recover: {text}", flush=True)
