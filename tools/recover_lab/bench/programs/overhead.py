"""Run by every rank of `recover bench overhead`: stock torch on gloo and recover.Step (all sums) take turns.

Arguments: model size, sequence length, accumulation, turns, and which of the two to run ("both"; "fast": without exact
sums; or one alone for its memory). Each turn is one optimizer step: accumulate, reduce, clip, update. Stock torch is
DDP where a replica is one rank, and `fully_shard` on a mesh of replicas x shards where it is several.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import recover
from recover.gradients.reduction import Bits, Reduction
from recover.parallel import rows
from recover.parallel.blocks import blocks_of
from recover.train.models import SIZES, Llama

size, seq_len, accum, turns, which = (
    sys.argv[1],
    int(sys.argv[2]),
    int(sys.argv[3]),
    int(sys.argv[4]),
    sys.argv[5],
)
run_dir = Path(os.environ["RECOVER_RUN_DIR"])
torch.set_num_threads(1)
world = recover.init()
config = replace(SIZES[size], seq_len=seq_len)
replicas, shards = len(world.replicas), world.grid.replica_size
mesh: DeviceMesh | None = None
if which != "ours" or shards > 1:
    store = dist.FileStore(str(run_dir / "store"), world.grid.ranks)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.grid.ranks)
if shards > 1:  # both use the same mesh: ours only along its second dimension
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


class Stream:
    """Random tokens: their values do not change the time of a step. A row for each rank of a replica."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, config.vocab, (shards, seq_len + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


def make(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = wrap(Llama(config))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def shard_over_the_mesh(model: torch.nn.Module) -> torch.nn.Module:
    for block in [*blocks_of(model), model]:
        fully_shard(block, mesh=mesh)
    return model


def stock() -> Callable[[], None]:
    model, optimizer = make(shard_over_the_mesh if shards > 1 else DistributedDataParallel)
    stream, taken = Stream(), 0

    def reducing(last: bool) -> AbstractContextManager[None]:
        if shards > 1:  # as FSDP2's users do: between replicas once a step, inside for every microbatch
            model.set_requires_all_reduce(last)
            return nullcontext()
        return nullcontext() if last else model.no_sync()

    def turn() -> None:
        nonlocal taken
        for microbatch in range(accum):
            tokens, targets = rows(world, stream[taken * replicas + world.replica])
            taken += 1
            with reducing(microbatch == accum - 1):
                (model(tokens, targets) / accum).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return turn


def ours(name: str = "fast", reduction: Reduction = "fast", bits: Bits = 64) -> Callable[[], None]:
    model, optimizer = make(lambda plain: recover.hsdp(plain, world, mesh=mesh["shard"]) if mesh else plain)
    step = recover.Step(
        world,
        model,
        optimizer,
        global_batch=replicas * accum,
        clip=1.0,
        reduction=reduction,
        reduction_bits=bits,
    )
    wire[name] = sum(bucket.local.nbytes for bucket in step._gradients.buckets)
    stream = Stream()

    def turn() -> None:
        for batch in step.microbatches(stream):
            tokens, targets = rows(world, batch)
            step.backward(model(tokens, targets))

    return turn


wire: dict[str, int] = {}  # bytes that a rank hands to a reduction in one step


def timed(turn: Callable[[], None]) -> float:
    world.cross.barrier().wait()
    start = time.perf_counter()
    turn()
    return time.perf_counter() - start


results: dict[str, Any] = {"parameters": sum(p.numel() for p in Llama(config).parameters())}
if which in ("both", "fast"):
    ways = {"stock": stock(), "ours": ours()}
    if which == "both":
        ways["reproducible"] = ours("reproducible", "reproducible")
        ways["reproducible_32"] = ours("reproducible_32", "reproducible", 32)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(turns + 1):
        for name in list(ways) if number % 2 else reversed(ways):
            # Our watcher is paused while stock DDP has its turn.
            with world._fabric.lock if name == "stock" else nullcontext():
                elapsed = timed(ways[name])
            if number:  # the first turn warms up
                times[name].append(elapsed)
    results["wire"] = wire
    results["seconds"] = times
else:
    turn = {"stock": stock, "ours": ours}[which]()
    for _ in range(2):
        turn()
    results["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
(run_dir / f"overhead-{world.rank}.json").write_text(json.dumps(results))
