"""The rows of a microbatch that a rank of a replica computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from recover.world.world import World


def rows(world: World, batch: Any) -> Any:
    """This rank's part of a microbatch whose rows are shared among the ranks of the replica.

    Tensors, and dicts, lists and tuples of them.
    """
    if isinstance(batch, dict):
        return {key: rows(world, value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(rows(world, value) for value in batch)
    if not isinstance(batch, torch.Tensor):
        return batch
    size = world.grid.replica_size
    if len(batch) % size:
        raise ValueError(
            f"a microbatch of {len(batch)} rows cannot be shared among the {size} ranks of a replica; "
            f"choose a multiple of {size}"
        )
    return batch.chunk(size)[world.shard]
