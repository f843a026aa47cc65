"""Sections of training, each held against one process of plain PyTorch that runs here as well; every rank writes notes.

Argument: a JSON list of sections, run one after the other in the same world; their steps are counted on. A name
alone is one of SECTIONS; `["frozen", "hsdp"]` shards the model over the ranks of the replica.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_  # by name, and before there is a Step: as scripts do

import recover
import recover.dropin
from recover.parallel import rows

torch.set_num_threads(1)
world = recover.init()
BATCH = 4
diary = os.open(f"{os.environ['RECOVER_RUN_DIR']}/diary-{world.rank}.jsonl", os.O_CREAT | os.O_WRONLY)


def note(kind: str, **facts: object) -> None:
    os.write(diary, (json.dumps({"kind": kind, **facts}) + "\n").encode())


class Stream:
    """Sample i is a function of i alone."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        inputs, targets = (torch.randn(4, n, generator=generator, dtype=self._dtype) for n in (8, 2))
        return inputs, targets, index


class Model(torch.nn.Module):
    """`never` is not used, `rarely` by one sample of nine: in most steps by none."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
        self.rarely, self.never = torch.nn.Linear(8, 8), torch.nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor, index: int) -> torch.Tensor:
        hidden = torch.tanh(self.early(inputs))
        return self.late(hidden + self.rarely(hidden) if index % 9 == 0 else hidden)


class Complex(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phases = torch.nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.odd = torch.nn.Parameter(torch.randn(3))  # an odd number of floats in the same bucket
        self.late = torch.nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor, index: int) -> torch.Tensor:
        turned = inputs * self.phases
        return self.late(turned.real * turned.imag) + self.odd.prod()


def loss_of(model: torch.nn.Module, sample: tuple[torch.Tensor, torch.Tensor, int]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(sample[0], sample[2]), sample[1])


Prepare = Callable[[torch.nn.Module, int], None]


def freeze_and_unfreeze(model: torch.nn.Module, number: int) -> None:
    """Before step `number` of a section; 0 is before there is a Step."""
    if number == 0:
        model.late.requires_grad_(False)
    if number == 3:
        if world.grid.replica_size > 1 and hasattr(model, "unshard"):
            with torch.no_grad():
                model(*rows(world, Stream()[0])[::2])  # an evaluation leaves the outermost module gathered
        model.early.requires_grad_(False)
        model.late.requires_grad_(True)
    if number == 5:
        model.early.requires_grad_(True)


def nothing(model: torch.nn.Module, number: int) -> None:
    pass


def plain(
    model: torch.nn.Module, first: int, steps: int, prepare: Prepare, stream: Stream
) -> list[torch.Tensor]:
    """The result of one process for the same samples."""
    prepare(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    for number in range(1, steps + 1):
        prepare(model, number)
        optimizer.zero_grad()
        for index in range((first + number - 1) * BATCH, (first + number) * BATCH):
            (loss_of(model, stream[index]) / BATCH).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def section(
    name: str,
    first: int,
    make: Callable[[], torch.nn.Module],
    prepare: Prepare,
    kind: str = "",
    steps: int = 6,
) -> None:
    torch.manual_seed(first)
    model, twin = make(), make()
    twin.load_state_dict(model.state_dict())
    stream = Stream(next(model.parameters()).real.dtype)
    prepare(model, 0)
    gradients = None
    if kind == "hsdp":
        model = recover.hsdp(model, world, blocks=[model.early])
    if kind == "ddp":
        recover.dropin.init_replica_world(world)
        model = DistributedDataParallel(model, find_unused_parameters=True)
        gradients = recover.dropin.DDPGradients(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    step = recover.Step(world, model, optimizer, BATCH, gradients=gradients)
    at = step.state_dict()
    step.load_state_dict(at | {"index": first, "samples": at["samples"] | {"next": first * BATCH}})
    moved = []
    for number in range(1, steps + 1):
        prepare(model, number)
        for sample in step.microbatches(stream):
            step.backward(loss_of(model, rows(world, sample) if kind == "hsdp" else sample))
        assert step.weight == BATCH, step.weight
        moved.append(len(step.incidents))
    mine = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    theirs = plain(twin, first, steps, prepare, stream)
    error = max(float((a.detach() - b).abs().max()) for a, b in zip(mine, theirs, strict=True))
    note(name, error=error, incidents=moved, replicas=world.replicas)


def frozen(first: int, kind: str = "") -> None:
    section("frozen", first, Model, freeze_and_unfreeze, kind)


def double(first: int, kind: str = "") -> None:
    section("double", first, lambda: Model().double(), nothing, kind, steps=2)


def complex_numbers(first: int) -> None:
    section("complex", first, Complex, nothing, steps=3)


def own_ddp(first: int) -> None:
    """A user's own DDP leaves unused parameters alone, and cannot freeze."""
    section("ddp", first, Model, nothing, "ddp", steps=3)
    refusal("ddp frozen", lambda: section("?", first + 3, Model, freeze_in_ddp, "ddp", steps=2))


def freeze_in_ddp(model: torch.nn.Module, number: int) -> None:
    if number == 1 and isinstance(model, DistributedDataParallel):
        model.module.early.requires_grad_(False)


def refusal(name: str, run: Callable[[], object]) -> None:
    try:
        run()
    except (RuntimeError, ValueError) as error:
        note(name, error=str(error))


def stray(first: int) -> None:
    """Gradients from outside are refused, zeros are not."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, stream = recover.Step(world, model, optimizer, BATCH), Stream()
    loss_of(model, stream[0]).backward()
    refusal("stray", lambda: next(step.microbatches(stream)))
    optimizer.zero_grad(set_to_none=False)
    for sample in step.microbatches(stream):
        step.backward(loss_of(model, sample))
    note("after a stray", steps=step.index, left=[p.grad is not None for p in model.parameters()])


def left_overs(first: int) -> None:
    """Every habit of a plain loop, in three steps; and before that a loop without any."""
    for habits in (False, True):
        model, stream = Model(), Stream()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        step = recover.Step(world, model, optimizer, BATCH, scheduler=scheduler)
        other = torch.nn.Linear(8, 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                for sample in step.microbatches(stream):
                    step.backward(loss_of(model, sample) / (BATCH if habits else 1))
                if habits:
                    clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                else:
                    torch.nn.functional.mse_loss(other(sample[0]), sample[1]).backward()
                    clip_grad_norm_(other.parameters(), 1.0)
                    torch.optim.SGD(other.parameters(), lr=0.1).step()
        note("left-overs" if habits else "no left-overs", said=[str(w.message) for w in caught])


def unlike(first: int) -> None:
    """From the start, one replica trains less than the others."""
    model = Model()
    model.early.requires_grad_(world.replica != 1)
    refusal("unlike", lambda: recover.Step(world, model, torch.optim.SGD(model.parameters(), lr=0.1), BATCH))


def alone(first: int) -> None:
    """One replica freezes what the others train."""

    def prepare(model: torch.nn.Module, number: int) -> None:
        if number == 2 and model is not None and world.replica == 1:
            model.early.requires_grad_(False)

    section("alone", first, Model, prepare, steps=3)


def scaled(first: int) -> None:
    """A scaled loss is refused before anything is reduced; also when it is divided afterwards."""
    model, scaler = Model(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = recover.Step(world, model, torch.optim.SGD(model.parameters(), lr=0.1), BATCH)
    for sample in step.microbatches(Stream()):
        loss = loss_of(model, sample)
        refusal("scaled", lambda loss=loss: step.backward(scaler.scale(loss) / 1024.0))
        break


SECTIONS: dict[str, Callable[..., None]] = {
    "frozen": frozen,
    "double": double,
    "complex": complex_numbers,
    "ddp": own_ddp,
    "stray": stray,
    "left-overs": left_overs,
    "unlike": unlike,
    "alone": alone,
    "scaled": scaled,
}
for number, entry in enumerate(json.loads(sys.argv[1])):
    name, *arguments = [entry] if isinstance(entry, str) else entry
    SECTIONS[name](10 * number, *arguments)
