"""Constructs of people's own training code, each as a plain loop has it: for runs under the launcher, and for one.

What the guide to porting says of a construct is shown with these; `tests/huggingface.py` adds more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, SequentialLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset

import recover

# A power of two: dividing by it is exact, in bf16, too, which a plain loop does before backward and Step after it.
STEPS, BATCH, VOCAB = 3, 8, 61
Batch = Any


class Numbers:
    """Sample i is a function of i alone."""

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, 8, generator=generator), torch.randn(4, 2, generator=generator)


class Padded:
    """Token sequences of different lengths: labels of padding are -100, as in Hugging Face's models."""

    def __getitem__(self, index: int) -> Batch:
        tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        for row in range(2):
            labels[row, 3 + (5 * index + 3 * row) % 9 :] = -100
        return {"input_ids": tokens, "labels": labels, "attention_mask": (labels != -100).long()}


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Batch]:
        numbers, index = Numbers(), 0
        while True:
            inputs, targets = numbers[index]
            yield inputs[0] + 0.1 * torch.rand(8), targets[0]
            index += 1


class Net(torch.nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.out, self.recompute = torch.nn.Linear(8, 2), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return self.out(x)


class Pixels(torch.nn.Module):
    """A model whose matrices lie in memory as `memory_format=torch.channels_last` lays them out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = torch.nn.Conv2d(2, 6, 2, bias=False), torch.nn.Conv2d(6, 2, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.first(x.view(-1, 2, 2, 2).repeat(1, 1, 2, 2)))).mean((2, 3))


class Tied(torch.nn.Module):
    """Input and output share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCAB, 16)
        self.inner, self.out = torch.nn.Linear(16, 16), torch.nn.Linear(16, VOCAB, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        logits = self.out(torch.tanh(self.inner(self.tokens(input_ids))))
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Adapted(torch.nn.Module):
    """A frozen matrix and a small trained one beside it, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(8, 2).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(8, 2, bias=False), torch.nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def predict(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return mse_loss(model(batch[0]), batch[1])


def in_bf16(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return mse_loss(model(batch[0]).float(), batch[1])


def of_model(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    told = model(**batch)
    return told if isinstance(told, torch.Tensor) else told.loss


def targets_of(batch: Batch) -> int:
    """How many labels count: the first label of a row is never a target."""
    return int((batch["labels"][:, 1:] != -100).sum())


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW with a larger eps: the gradient of a key's bias is 0 but for rounding, and AdamW would make steps of it."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-5)


def fused(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def in_groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.SGD(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.05, momentum=0.9
    )


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    first = LambdaLR(optimizer, lambda done: (done + 1) / 2)
    return SequentialLR(optimizer, [first, CosineAnnealingLR(optimizer, 5)], [1])


@dataclass(frozen=True)
class Construct:
    """The parts of a plain loop; those that are left out have the usual defaults."""

    model: Callable[[], torch.nn.Module] = Net
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor] = predict
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = adamw
    scheduler: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: None
    plateau: bool = False  # a scheduler that the user calls
    clip: float | None = None
    weight: Callable[[Batch], int] | None = None
    stream: Callable[[], Any] = Numbers
    between: Callable[[torch.nn.Module, int], Any] = lambda model, number: None  # after each step
    wrap: Callable[[torch.nn.Module], Any] = lambda model: model


def unfreeze(model: Any, number: int) -> None:
    if number == 1:
        model.base.requires_grad_(True)


CONSTRUCTS: dict[str, Construct] = {
    "plain loop": Construct(),
    "parameter groups, momentum, clipping, a sequence of schedulers": Construct(
        optimizer=in_groups, scheduler=warm_up, clip=0.5
    ),
    "ReduceLROnPlateau, called by the user": Construct(plateau=True),
    "tied weights": Construct(Tied, of_model, stream=Padded),
    "mean over all tokens of padded batches": Construct(Tied, of_model, weight=targets_of, stream=Padded),
    "frozen base, adapters, unfrozen on the way": Construct(
        Adapted, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05), between=unfreeze
    ),
    "activation checkpointing": Construct(lambda: Net(recompute=True)),
    "torch.compile": Construct(wrap=lambda model: torch.compile(model, backend="eager")),
    "bf16 autocast": Construct(loss=in_bf16),
    "channels_last, a fused optimizer": Construct(Pixels, optimizer=fused),
    "IterableDataset": Construct(stream=lambda: recover.stream(Endless(), batch_size=4, window=BATCH)),
}


def plain(construct: Construct) -> list[torch.Tensor]:
    """The final parameters of one process."""
    torch.manual_seed(1)
    model = construct.model()
    compute, optimizer, stream = construct.wrap(model), construct.optimizer(model), construct.stream()
    scheduler = construct.scheduler(optimizer)
    plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=1.0) if construct.plateau else None
    for number in range(STEPS):
        batches = [stream[number * BATCH + slot] for slot in range(BATCH)]
        weights = [construct.weight(batch) if construct.weight else 1 for batch in batches]
        total = 0.0
        for batch, weight in zip(batches, weights, strict=True):
            loss = construct.loss(compute, batch) * weight / sum(weights)
            loss.backward()
            total += loss.item()
        if construct.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), construct.clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if plateau is not None:
            plateau.step(total)
        construct.between(model, number)
    return [p.detach() for p in model.parameters()]


def ours(construct: Construct, world: Any, after_backward: Callable[[int], object]) -> list[torch.Tensor]:
    """The final parameters of the same loop on replicas."""
    torch.manual_seed(1)
    model = construct.model()
    compute, optimizer, stream = construct.wrap(model), construct.optimizer(model), construct.stream()
    scheduler = construct.scheduler(optimizer)
    plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=1.0) if construct.plateau else None
    step = recover.Step(world, model, optimizer, BATCH, scheduler=scheduler, clip=construct.clip)
    while step.index < STEPS:
        for batch in step.microbatches(stream):
            step.backward(
                construct.loss(compute, batch), construct.weight(batch) if construct.weight else None
            )
            after_backward(step.index)
        if plateau is not None:
            plateau.step(step.loss)
        construct.between(model, step.index - 1)
    return [p.detach() for p in model.parameters()]
