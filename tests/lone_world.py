"""A world of one replica of one rank, in this process, for steps that need no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from toy import make_optimizer

import recover
from recover.job.grid import Grid
from recover.job.spec import JobSpec
from recover.world.hooks import NoHooks

BATCH = 4


@contextmanager
def torch_world_of_one() -> Iterator[None]:
    """Torch's own process group, of this process alone: for DDP, FSDP2 and meshes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Cross:
    """A group of one."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def all_reduce(self, source: Any, out: Any = None) -> SimpleNamespace:
        if out is not None:
            out[:] = source
        self._log.append("totals" if isinstance(source, np.ndarray) else "bucket")
        return self.broadcast(source)

    def all_max(self, data: Any) -> SimpleNamespace:
        return self.broadcast(data)

    def broadcast(self, data: Any) -> SimpleNamespace:
        return SimpleNamespace(ok=True, refused=False, wait=lambda: True, behind=lambda: None)

    def drain(self) -> None:
        self._log.append("drain")

    def abort_operations(self, why: str = "") -> None:
        pass


class World:
    """One replica of one rank, alone."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.job = JobSpec(1)
        self.grid, self.rank, self.replica, self.shard, self.epoch = Grid(1, 1), 0, 0, 0, 1
        self.replicas, self.members, self.noticed_at, self.closing = (0,), (0,), None, list[object]()
        self.outside, self.asking, self.arrivals, self.steps_made = False, (), (), 0
        self.worker = None
        self.cross, self.hooks = Cross(self.log), NoHooks()
        self.board = SimpleNamespace(
            **dict.fromkeys(("come_to_vote", "compute", "touch", "accomplish", "make_step"), lambda *_: None)
        )
        self.notes = SimpleNamespace(read=lambda step: ())

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        yield

    @contextmanager
    def call(self, call: object, lost: object = None) -> Iterator[None]:
        yield

    def agree(self, word: int) -> int:
        self.log.append("agree")
        return word

    def linger(self) -> None:
        pass


def begin(world: World, model: torch.nn.Module, **options: Any) -> recover.Step:
    options = {"bucket_mb": 0.002} | options
    return recover.Step(world, model, make_optimizer(model), BATCH, **options)  # type: ignore[arg-type]
