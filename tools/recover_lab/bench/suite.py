"""`recover bench all`: every benchmark in turn, and one page of them all."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recover_lab.bench.breakdown import bench_breakdown
from recover_lab.bench.collectives import bench_collectives, bench_repair
from recover_lab.bench.figures import FIGURES
from recover_lab.bench.measure import begin
from recover_lab.bench.multi import bench_multi
from recover_lab.bench.paced import bench_paced
from recover_lab.bench.peers import bench_peers
from recover_lab.bench.rejoin import bench_multi_rejoining
from recover_lab.bench.rejoin_hosts import bench_return
from recover_lab.bench.several_hosts import PARTS, HostsOptions, bench_hosts
from recover_lab.bench.simulations import bench_simulate
from recover_lab.bench.sweep import bench_sweep
from recover_lab.bench.training import bench_overhead, bench_recovery
from recover_lab.bench.trajectory import bench_trajectory
from recover_lab.bench.verify import bench_verify
from recover_lab.peers.scene import Scene
from recover_lab.publish.measured_sources import measured
from recover_lab.publish.page import build

DDP, HSDP = Scene(), Scene(replicas=4, shard=2, pace=0.3)  # 8 ranks that gather shards need longer
PIPELINE = Scene(replicas=4, pp=2)
GRID = Scene(replicas=4, tp=2, pp=2, pace=0.5)  # 16 ranks on few cores: computing needs longer
HOSTS = HostsOptions(PARTS, (4, 16, 64), 40, (2, 4), "small", 20, 3, 2, 3, DDP.pace, 2.0, 5.0, 5.0)
Part = Callable[[Path], Any]


def parts(long: bool) -> dict[str, Part]:
    """Benchmarks by the name of their file, in the order in which they run."""
    calm = DDP.but(replicas=16 if long else DDP.replicas, steps=260 if long else 32)
    intervals = (2, 4, 8, 16, 32, 64) if long else (2, 6, 16)
    factors = (0.5, 3, 10) if long else (2,)
    few = intervals if long else (2, 8)
    grid = GRID if long else PIPELINE

    def multi(scene: Scene, path: Path) -> None:
        before = path.with_name(path.name.replace("multi", "breakdown"))
        bench_multi(scene, None, path, known=before, only_best=not long)

    return {
        "trajectory": lambda path: bench_trajectory(calm, 5 if long else 8, path),
        "breakdown-ddp": lambda path: bench_breakdown(DDP, intervals, path),
        "multi-ddp": lambda path: multi(DDP, path),
        "breakdown-hsdp": lambda path: bench_breakdown(HSDP, few, path),
        "multi-hsdp": lambda path: multi(HSDP, path),
        "breakdown-3d": lambda path: bench_breakdown(grid, few, path),
        "multi-3d": lambda path: multi(grid, path),
        **({"trajectory-hsdp": lambda path: bench_trajectory(HSDP.but(steps=260), 60, path)} if long else {}),
        **({"trajectory-3d": lambda path: bench_trajectory(GRID.but(steps=60), 15, path)} if long else {}),
        "sweep": lambda path: bench_sweep(DDP, factors, path.with_name("multi-ddp.json"), path),
        "peers": lambda path: bench_peers(None, path),
        "overhead": lambda path: bench_overhead("small", 2, 1, 128, 2, 20, path),
        "overhead-hsdp": lambda path: bench_overhead("small", 2, 2, 128, 2, 10, path),
        "recovery": lambda path: bench_recovery(4, path),
        "repair": lambda path: bench_repair(8, path),
        "simulate": lambda path: bench_simulate((1024, 16384, 131072, 600_000), path),
        "collectives": lambda path: bench_collectives((2, 4, 8) if long else (2, 4), (1, 25, 100), 9, path),
        "hosts": lambda path: bench_hosts(HOSTS, None, path),
        "return": lambda path: bench_return(3, DDP.pace, (5, 50, 200), 3, None, path),
        "returning": lambda path: bench_multi_rejoining(
            DDP, None, (1, 4), path, known=path.with_name("breakdown-ddp.json")
        ),
        "verify": lambda path: bench_verify((16, 256), 4, 1, 24 if long else 12, 0.02, 3, path),
        "paced": lambda path: bench_paced(8, 32, 0.02, (1.2, 1.5, 2, 3, 4) if long else (2, 4), path),
    }


def bench_all(output: Path, fresh: bool, long: bool) -> int:
    """Returns the number of benchmarks that failed."""
    if long:
        output /= "long"
    console = begin(output / "figures.md")
    all_parts = parts(long)
    lost = []
    for number, (name, measure) in enumerate(all_parts.items(), start=1):
        path = output / f"{name}.json"
        head = f"[{number} of {len(all_parts)}] {name}"
        if not fresh and measured(path):
            console.print(f"{head}: already measured on these sources, see {path}", markup=False)
            continue
        console.print(f"{head} ...", style="bold", markup=False)
        began = time.monotonic()
        try:
            measure(path)
            console.print(f"{head}: {time.monotonic() - began:.0f} s", style="dim", markup=False)
        except Exception as error:  # the other benchmarks still run
            lost.append(name)
            console.print(f"{head}: {type(error).__name__}: {error}", style="red", markup=False)
    page = build(output, FIGURES)
    console.print(f"page: {page}")
    if lost:
        console.print(f"not measured: {', '.join(lost)}; the same command continues with them")
    return len(lost)
