"""Parameters whose numbers do not follow each other by rows: gradients and moments lie in memory as autograd has them.

Kernels that walk through memory (fused optimizers) assume that a parameter, its gradient and its moments are laid out
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lone_world import BATCH, World, torch_world_of_one
from torch.nn.parallel import DistributedDataParallel

import recover
import recover.dropin
from recover.world.carriers.worker import Worker

STEPS = 3
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "by rows": lambda: torch.randn(4, 6),
    "channels last": lambda: torch.randn(5, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "turned": lambda: torch.randn(4, 6, dtype=torch.float32).t(),
    "complex, turned": lambda: torch.randn(4, 6, dtype=torch.complex64).t(),
    "bfloat16, turned": lambda: torch.randn(4, 6).bfloat16().t(),
    "turned in three dimensions": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "a size of 1": lambda: torch.randn(6).as_strided((1, 6), (9, 1)),
    "gaps": lambda: torch.randn(4, 12)[:, ::2],
}


class Odd(torch.nn.Module):
    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = torch.nn.Parameter(torch.randn(3, dtype=make().dtype))
        self.odd = torch.nn.Parameter(make())
        self.behind = torch.nn.Parameter(torch.randn(2, 2, dtype=make().dtype))

    def forward(self, slot: int) -> torch.Tensor:
        scale = torch.linspace(0.5, 1.5, self.odd.numel()).view(self.odd.shape) * (1 + slot % 3) / 3
        parts = (self.before * slot / 12, self.odd * scale, self.behind)
        return sum(((part - 0.3).abs() ** 2).mean().float() for part in parts)  # type: ignore[return-value]


def order_of(tensor: torch.Tensor) -> list[int]:
    """The strides of a tensor, without those of dimensions of size 1, which say nothing."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def optimizer_of(model: Odd, fused: bool, seen: list[Any]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)

    def look(*_: Any) -> None:
        gradients: list[Any] = [p.grad for p in model.parameters()]
        seen.append([(order_of(gradient), gradient.detach().clone()) for gradient in gradients])

    optimizer.register_step_pre_hook(look)
    return optimizer


def plain(make: Callable[[], torch.Tensor], fused: bool) -> tuple[Odd, list[Any]]:
    model, seen = Odd(make), list[Any]()
    optimizer = optimizer_of(model, fused, seen)
    for number in range(STEPS):
        for slot in range(BATCH):
            (model(number * BATCH + slot) / BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    alone = SimpleNamespace(worker=Worker())
    monkeypatch.setattr("recover.dropin.ddp.init", lambda: alone)
    with torch_world_of_one():
        yield


@pytest.mark.guarantee(
    "The trajectory",
    "Gradients and handed-over moments keep the strides of autograd, so fused kernels are right for "
    "`channels_last` and own DDP models.",
)
@pytest.mark.filterwarnings("ignore:Grad strides do not match")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (kind, layout)
        for kind in ("plain", "reproducible", "DDP", "DDP, views of its buckets")
        for layout in LAYOUTS
        if not (kind.startswith("DDP") and "complex" in layout)  # DDP refuses these
    ],
)
def test_gradients_keep_autograd_strides_and_fused_kernels_are_right(
    kind: str, layout: str, replica: None
) -> None:
    fused = layout not in ("gaps", "complex, turned")  # torch has no correct fused kernel for these
    model, seen = Odd(LAYOUTS[layout]), list[Any]()
    optimizer = optimizer_of(model, fused, seen)
    options: dict[str, Any] = {"reduction": kind} if kind == "reproducible" else {}
    compute: torch.nn.Module = model
    if kind.startswith("DDP"):
        compute = DistributedDataParallel(model, gradient_as_bucket_view="views" in kind)
        options["gradients"] = recover.dropin.DDPGradients(compute)
    step = recover.Step(World(), compute, optimizer, BATCH, **options)  # type: ignore[arg-type]
    while step.index < STEPS:
        for slot in step.microbatches(range(STEPS * BATCH)):
            step.backward(compute(slot))
    alone, as_autograd_has_them = plain(LAYOUTS[layout], fused)
    for ours, theirs in zip(seen, as_autograd_has_them, strict=True):
        for (order, gradient), (right_order, right) in zip(ours, theirs, strict=True):
            assert order == right_order
            torch.testing.assert_close(gradient, right)
    for parameter, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, right)
