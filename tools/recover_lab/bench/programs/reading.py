"""Run by every rank of `recover bench data`: stock DDP with torch's DataLoader, and recover.Step with recover.stream.

Arguments: model size, sequence length, sequences in a microbatch, accumulation, workers, turns, and the milliseconds
that an item of the slow dataset takes. Each turn is a few optimizer steps in a row: what was read ahead while others
had their turn does not last for all of them. Four ways take turns, both sides on a dataset that is in memory and both
on the slow one; and a fifth, ours with batches that are never read. The batches of the first step of a
turn may have been read ahead during other turns, so the clock starts after that step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import recover
from recover.train.models import SIZES, Llama

STEPS = 4  # in a turn; both sides read ahead two at most
size = sys.argv[1]
seq_len, sequences, accum, workers, turns = map(int, sys.argv[2:7])
pause = float(sys.argv[7]) / 1e3
run_dir = Path(os.environ["RECOVER_RUN_DIR"])
torch.set_num_threads(1)
world = recover.init()
config = replace(SIZES[size], seq_len=seq_len)
replicas = len(world.replicas)
store = dist.FileStore(str(run_dir / "store"), world.grid.ranks)
dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.grid.ranks)


class Tokens(Dataset):
    """Random tokens, of which an item takes `pause` seconds to read."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randint(0, config.vocab, (4096, seq_len + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._pause) if self._pause else None
        return self._rows[index, :-1], self._rows[index, 1:]


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Llama(config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


# Each side trains one model for all of its ways: a way continues where the previous way has left the model.
plain, plain_optimizer = make()
theirs = DistributedDataParallel(plain)
model, optimizer = make()
step = recover.Step(world, model, optimizer, global_batch=replicas * accum, clip=1.0)


def stock(pause: float) -> Callable[[], None]:
    dataset = Tokens(pause)
    sampler: Any = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, sequences, sampler=sampler, num_workers=workers, drop_last=True)
    loaders.append(batches := endless(loader))

    def turn() -> None:
        for microbatch in range(accum):
            tokens, targets = next(batches)
            with nullcontext() if microbatch == accum - 1 else theirs.no_sync():
                (theirs(tokens, targets) / accum).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    return turn


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def ours(stream: Any) -> Callable[[], None]:
    def turn() -> None:
        for tokens, targets in step.microbatches(stream):
            step.backward(model(tokens, targets))

    return turn


def read(pause: float) -> Any:
    return recover.stream(Tokens(pause), batch_size=sequences, shuffle=True, seed=0, workers=workers)


class Held:
    """A stream that returns the same microbatch for every number."""

    def __init__(self) -> None:
        self._batch = recover.stream(Tokens(0.0), batch_size=sequences)[0]

    def __getitem__(self, index: int) -> Any:
        return self._batch


loaders: list[Any] = []
ways = {
    "stock": stock(0.0),
    "ours": ours(read(0.0)),
    "stock slow": stock(pause),
    "ours slow": ours(read(pause)),
    "ours unread": ours(Held()),
}
times: dict[str, list[float]] = {name: [] for name in ways}
for number in range(turns + 1):
    for name in list(ways) if number % 2 else reversed(ways):
        # Our watcher is paused while stock DDP has its turn.
        with world._fabric.lock if name.startswith("stock") else nullcontext():
            ways[name]()
            world.cross.barrier().wait()
            start = time.perf_counter()
            for _ in range(STEPS):
                ways[name]()
            elapsed = (time.perf_counter() - start) / STEPS
        if number:  # the first turn warms up
            times[name].append(elapsed)
for batches in loaders:
    batches.close()  # ends torch's workers at once
(run_dir / f"reading-{world.rank}.json").write_text(json.dumps(times))
