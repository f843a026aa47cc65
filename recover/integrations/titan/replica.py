"""The ranks of one replica as torchtitan has arranged them: all of its meshes are inside."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims

from recover.gradients.replica_interface import Sharing
from recover.parallel.hsdp import ShardedReplica


class TitanReplica(ShardedReplica):
    """Gradients are summed inside the replica by torchtitan's own means: FSDP2, DTensor, dispatchers."""

    def __init__(self, dims: ParallelDims, device: torch.device, model: torch.nn.Module) -> None:
        assert dist.group.WORLD is not None
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        super().__init__(dist.group.WORLD, device, sharded)
        self._ranks_of_stage = dims.world_size // dims.pp
        self.peers_hold_all_buffers = not dims.pp_enabled

    def reshard(self) -> None:
        for module in self._modules:
            module.reshard()

    def knows(self, parameter: torch.nn.Parameter) -> bool:
        return True

    def sharing(self, parameter: torch.nn.Parameter) -> Sharing:
        """Ranks of a pipeline stage that hold the same part count once in the norm."""
        parts = 1
        for dimension, placement in enumerate(getattr(parameter, "placements", ())):
            if placement.is_shard():
                parts *= parameter.device_mesh.size(dimension)  # type: ignore[attr-defined]
        return Sharing(copies=self._ranks_of_stage // parts)
