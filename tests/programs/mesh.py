"""A (replica, shard) device mesh with backend "ulfm" across replicas and gloo inside; wrong groups are refused."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import recover
import recover.dropin

world = recover.init()
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['RECOVER_RUN_DIR']}/store", rank=world.rank, world_size=4
)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard"), backend_override={"dp": "ulfm"})
assert isinstance(mesh.get_group("dp"), recover.dropin.ProcessGroupULFM)
ranks = torch.tensor([float(world.rank)])
dist.all_reduce(ranks, group=mesh.get_group("dp"))
assert ranks.item() == {0: 2.0, 1: 4.0}[world.shard]
dist.all_reduce(ranks, group=mesh.get_group("shard"))
assert ranks.item() == 6.0
try:
    dist.new_group([0, 1], backend="ulfm")
    assert world.rank > 1
except ValueError as refusal:
    assert "cross-replica group" in str(refusal)  # noqa: PT017
