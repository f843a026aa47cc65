"""A stock DDP model on torch backend `argv[1]`; writes its losses. No failure handling of any kind."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import recover
import recover.dropin

torch.set_num_threads(1)
world = recover.init()
backend = sys.argv[1]
dist.init_process_group(
    backend, init_method=f"file://{sys.argv[2]}", rank=world.rank, world_size=world.grid.ranks
)

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(32, 256), torch.nn.BatchNorm1d(256), torch.nn.GELU(), torch.nn.Linear(256, 8)
)
model = DistributedDataParallel(model, bucket_cap_mb=0.02, process_group=dist.new_group(backend=backend))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(world.rank)
losses = []
for _ in range(10):
    inputs, target = torch.randn(16, 32, generator=generator), torch.randint(0, 8, (16,), generator=generator)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), target)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

largest = torch.tensor([float(world.rank)])
dist.all_reduce(largest, op=dist.ReduceOp.MAX)
assert largest.item() == world.grid.ranks - 1
rows = [torch.zeros(2) for _ in range(world.grid.ranks)]
dist.all_gather(rows, torch.full((2,), float(world.rank)))
assert [row[0].item() for row in rows] == list(range(world.grid.ranks))
dist.barrier()
with open(f"{os.environ['RECOVER_RUN_DIR']}/diary-{world.rank}.jsonl", "w") as diary:
    diary.write(json.dumps({"kind": "losses", "losses": losses}) + "\n")
