"""A user's own FullyShardedDataParallel (FSDP1, what the paper uses) under `recover.Step`.

    recover.dropin.init_replica_world(world)          # FSDP shards over the ranks of this replica
    model = FullyShardedDataParallel(net)
    step = recover.Step(world, model, optimizer, global_batch=256, gradients=recover.dropin.FSDPGradients(model, world))

FSDP reduces and scatters gradients inside the replica; after a backward pass, the gradients on this
rank go into our buckets, which are reduced across replicas. FSDP refuses hooks of its own while it
shards, so nothing overlaps here; `recover.hsdp` does better.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from recover.gradients.accumulation import ignore
from recover.gradients.module_gradients import OwnedGradients
from recover.gradients.replica_interface import mark
from recover.parallel.hsdp import ShardedReplica
from recover.world.world import World

SHARDED = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)


class FSDPGradients(OwnedGradients):
    """The sharded gradients of an FSDP-wrapped model, for `recover.Step(..., gradients=...)`."""

    # Autograd's hooks would see the gradient of the gathered parameter, before FSDP has reduced and
    # scattered it.
    has_hooks = False

    def __init__(self, model: FullyShardedDataParallel, world: World, bucket_mb: float | None = None) -> None:
        for module in FullyShardedDataParallel.fsdp_modules(model):
            if module.sharding_strategy not in SHARDED:
                raise ValueError(
                    f"sharding_strategy={module.sharding_strategy.name} would leave other gradients than this rank's "
                    f"shard; use FULL_SHARD or SHARD_GRAD_OP, and let recover do what is between replicas"
                )
            if dist.get_world_size(module.process_group) != world.grid.replica_size:
                raise ValueError(
                    f"this FSDP model spans {dist.get_world_size(module.process_group)} ranks, and a replica has "
                    f"{world.grid.replica_size}; call recover.dropin.init_replica_world(world) before wrapping it"
                )
            ignore(module, "no_sync")  # every microbatch leaves its gradient here, to be counted
        assert model.process_group is not None
        super().__init__(model.parameters(), bucket_mb)
        mark(model, ShardedReplica(model.process_group, next(model.parameters()).device))

    def lay_out(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if "buckets" in vars(self):
            raise ValueError(
                "parameters were frozen or unfrozen, and FSDP has flattened those that it was wrapped with; use "
                "recover.hsdp, or wrap the model again, with a new FSDPGradients and a new Step"
            )
        super().lay_out(parameters)
