"""Run by every rank of `recover bench gpu`: sums of large tensors, by our carrier and by torch's own groups.

Arguments: device, megabytes by comma, rounds, and torch's backends by comma.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from recover_lab.peers.gpu_rank import GpuRank

kind, sizes, rounds = sys.argv[1], [float(size) for size in sys.argv[2].split(",")], int(sys.argv[3])
me = GpuRank(kind)
groups = me.stock_groups(sys.argv[4])
expected = me.ranks * (me.ranks + 1) / 2
seconds: dict[str, dict[str, list[float]]] = {}


def carry(source: torch.Tensor, out: torch.Tensor) -> None:
    if not me.world.cross.all_reduce(source, out).wait():
        raise RuntimeError(f"the reduction failed: {me.world.cross.error}")


def measure(count: int) -> dict[str, list[float]]:
    source = torch.full((count,), float(me.world.rank + 1), device=me.device)
    out = torch.empty_like(source)
    ways: dict[str, Callable[[], Any]] = {"ours": lambda: carry(source, out)}
    for name, group in groups.items():
        ways[f"stock {name}"] = partial(dist.all_reduce, out, group=group)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            out.copy_(source)
            me.synchronize()
            dist.barrier()
            start = time.perf_counter()
            way()
            me.synchronize()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - start)
            if not bool((out == expected).all()):
                raise RuntimeError(f"{name}: a wrong sum, {out[:3].tolist()} instead of {expected:g}")
            me.say(f"{4 * count / 1e6:g} MB, {name}")
    return times


for megabytes in sizes:
    seconds[f"{megabytes:g}"] = measure(int(megabytes * 250_000))
results = {"seconds": seconds, "refused": me.refused, **me.place}
(me.run_dir / f"reduce-{me.world.rank}.json").write_text(json.dumps(results))
