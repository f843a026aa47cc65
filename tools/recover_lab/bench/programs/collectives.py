"""Run by every rank of `recover bench collectives`: one buffer, several ways to sum it, interleaved."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import recover
from recover.dropin import ProcessGroupULFM, ulfm_allreduce
from recover.world.carriers.gloo import GlooCarrier
from recover.world.carriers.host_memory import StagingByDevice

sizes, rounds = json.loads(sys.argv[1]), int(sys.argv[2])
run_dir = Path(os.environ["RECOVER_RUN_DIR"])
torch.set_num_threads(1)
world = recover.init(carrier="mpi")
ulfm = ProcessGroupULFM(world)

# The gloo carrier next to the mpi one: its addresses travel as the record of a repair in which no rank died.
gloo_carrier = GlooCarrier(world.rank, world.grid, world.worker, world.members, StagingByDevice())
offers = world.repair(gloo_carrier.offer()).records
gloo_carrier.build(offers, bool, lambda: False)
stock: Any = dist.ProcessGroupGloo(  # type: ignore[call-arg]
    dist.FileStore(str(run_dir / "store"), len(world.members)), world.rank, len(world.members)
)


def measure(megabytes: float) -> dict[str, list[float]]:
    count = int(megabytes * 250_000)
    source = torch.rand(count)
    out = torch.empty_like(source)
    expected = source.clone()
    world.cross.all_reduce(expected).wait()

    def stock_with_snapshot() -> None:
        """Gloo reduces in place: to be able to rewind, the bucket must be copied first."""
        out.copy_(source)
        stock.allreduce([out]).wait()

    ways: dict[str, Callable[[], Any]] = {
        "mpi carrier": lambda: world.cross.all_reduce(source, out).wait(),
        "gloo carrier": lambda: world.worker.post(lambda: gloo_carrier.all_reduce(source, out)).wait(),
        "stock gloo": lambda: stock.allreduce([out]).wait(),
        "stock gloo + snapshot": stock_with_snapshot,
        "mpi in place": lambda: world.cross.all_reduce(out).wait(),
        "ulfm_allreduce": lambda: ulfm_allreduce(out, ulfm).wait(),
        "memory bound": lambda: np.add(source.numpy(), source.numpy(), out=out.numpy()),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for attempt in range(rounds + 1):
        for name, way in ways.items():
            out.copy_(source)
            world.cross.barrier().wait()
            start = time.perf_counter()
            way()
            elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            if name != "memory bound":
                torch.testing.assert_close(out, expected)
            slowest = torch.empty(world.cross.size, 1, dtype=torch.float64)
            world.cross.all_gather(elapsed, slowest).wait()
            if attempt:  # the first round warms up
                times[name].append(slowest.max().item() * 1e3)
    return times


results = {str(size): measure(size) for size in sizes}
if world.rank == 0:
    (run_dir / "times.json").write_text(json.dumps(results))
