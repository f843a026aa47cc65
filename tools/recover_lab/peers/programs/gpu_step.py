"""Run by every rank of `recover bench gpu`: one optimizer step, computed alone, by stock DDP, and by recover.Step.

Arguments: device, model size, sequence length, accumulation, turns, the backends of stock DDP by comma, and whether all
variants may be in memory at once (`yes`, `no`, or `auto`). If so they take turns one by one; otherwise in blocks,
twice, the second time in reverse order.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from recover_lab.peers.gpu_rank import GpuRank, RandomTokens
from torch.nn.parallel import DistributedDataParallel

import recover
from recover.train.models import SIZES, Llama

kind, size, backends, together = sys.argv[1], sys.argv[2], sys.argv[6], sys.argv[7]
seq_len, accum, turns = map(int, sys.argv[3:6])
me = GpuRank(kind)
groups = me.stock_groups(backends)
stream = RandomTokens(SIZES[size].vocab, seq_len, me.device)
peaks: dict[str, int] = {}
Turn = Callable[[], None]


def plain(model: Any, optimizer: torch.optim.Optimizer, apart: Callable[[], Any]) -> Turn:
    def turn() -> None:
        for microbatch in range(accum):
            reducing: AbstractContextManager[Any] = apart() if microbatch < accum - 1 else nullcontext()
            with reducing:
                (me.forward(model, stream[microbatch * me.ranks + me.world.rank]) / accum).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return turn


def stock(group: dist.ProcessGroup) -> Turn:
    model, optimizer = me.make(size, seq_len)
    wrapped = DistributedDataParallel(
        model,
        device_ids=[me.device.index] if me.on_gpu else None,
        gradient_as_bucket_view=True,
        process_group=group,
    )
    return plain(wrapped, optimizer, wrapped.no_sync)


def ours() -> Turn:
    model, optimizer = me.make(size, seq_len)
    step = recover.Step(me.world, model, optimizer, global_batch=me.ranks * accum, clip=1.0)

    def turn() -> None:
        for batch in step.microbatches(stream):
            step.backward(me.forward(model, batch))

    return turn


makers: dict[str, Callable[[], Turn]] = {
    "alone": lambda: plain(*me.make(size, seq_len), nullcontext),
    **{f"stock {name}": partial(stock, group) for name, group in groups.items()},
    "ours": ours,
}


def timed(name: str, turn: Turn) -> float:
    # Our watcher is paused while others have their turn.
    with nullcontext() if name == "ours" else me.world._fabric.lock:
        dist.barrier()
        me.synchronize()
        start = time.perf_counter()
        turn()
        me.synchronize()
        return time.perf_counter() - start


def warm(name: str) -> Turn:
    """Make a variant and take two steps; notes its peak memory above the memory in use before."""
    gc.collect()
    before = 0
    if me.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    turn = makers[name]()
    for _ in range(2):
        timed(name, turn)
    if me.on_gpu:
        peaks.setdefault(name, torch.cuda.max_memory_allocated() - before)
    me.say(f"{name}: made")
    return turn


with torch.device("meta"):
    parameters = sum(p.numel() for p in Llama(SIZES[size]).parameters())
if together == "auto":
    sharing = -(-me.ranks // torch.cuda.device_count())
    fits = len(makers) * 24 * parameters * sharing < 0.8 * torch.cuda.mem_get_info()[1]
    together = "yes" if fits else "no"
if me.on_gpu:  # the memory of cuBLAS itself counts for no variant
    torch.ones(64, 64, device=me.device) @ torch.ones(64, 64, device=me.device)
seconds: dict[str, list[float]] = {name: [] for name in makers}
kept = {"ours": warm("ours")}  # a step stays until its process ends, and so does its memory
if together == "yes":
    for name in makers:  # each alone, to measure its memory; then all together
        if name not in kept:
            warm(name)
    kept |= {name: warm(name) for name in makers if name not in kept}
    for number in range(turns):
        for name in list(makers) if number % 2 else reversed(makers):
            seconds[name].append(timed(name, kept[name]))
    me.say(", ".join(f"{name} {1e3 * times[-1]:.0f} ms" for name, times in seconds.items()))
else:
    for number in range(2):
        for name in list(makers) if number % 2 else reversed(makers):
            turn = kept.get(name) or warm(name)
            timed(name, turn)
            seconds[name] += [timed(name, turn) for _ in range(-(-turns // 2))]
            me.say(f"{name}: {1e3 * seconds[name][-1]:.0f} ms")
            del turn
facts = {"seconds": seconds, "peak_bytes": peaks, "parameters": parameters, "together": together == "yes"}
results = {**facts, **me.place, "refused": me.refused}
(me.run_dir / f"step-{me.world.rank}.json").write_text(json.dumps(results))
