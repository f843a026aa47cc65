"""Habits of plain loops whose numbers must not change under Step: each is compared with its twin in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lone_world import World
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, SubsetRandomSampler

import recover
from recover.step.in_flight import dataloader_remedy

BATCH, STEPS = 4, 6
INPUTS = [
    torch.randn(8, 6, generator=torch.Generator().manual_seed(index)) + index // BATCH * 0.5
    for index in range(BATCH * STEPS)
]


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - inputs).square().mean()


def ours(model: nn.Module, optimizer: Any, **options: Any) -> nn.Module:
    step = recover.Step(World(), model, optimizer, BATCH, **options)  # type: ignore[arg-type]
    while step.index < STEPS:
        for inputs in step.microbatches(INPUTS):
            step.backward(loss_of(model, inputs))
    return model


def plain(model: nn.Module, optimizer: Any) -> nn.Module:
    for number in range(STEPS):
        for slot in range(BATCH):
            (loss_of(model, INPUTS[number * BATCH + slot]) / BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


class Optimistic(torch.optim.Optimizer):
    """An optimizer that keeps its gradients (the tensors, not copies) from some step on, and uses the last and all."""

    def __init__(self, parameters: Any, keep: Keep, since: int = 1) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.kept: dict[Any, Any] = {}
        self._keep, self._since, self._steps = keep, since, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                *_, last = all_kept = self._keep(self, parameter) or [parameter.grad]
                parameter.sub_(group["lr"] * (2 * parameter.grad - last))
                parameter.sub_(group["lr"] * 0.1 * sum(all_kept))
                if self._steps >= self._since:
                    self._keep(self, parameter, parameter.grad)


Keep = Callable[..., Any]


def in_state(optimizer: Any, parameter: Any, *new: torch.Tensor) -> Any:
    kept = optimizer.state[parameter].setdefault("all", [])
    kept += new
    return kept


def in_a_tuple(optimizer: Any, parameter: Any, *new: torch.Tensor) -> Any:
    state = optimizer.state[parameter]
    state["all"] = (*state.get("all", ()), *new)
    return state["all"]


def beside_its_state(optimizer: Any, parameter: Any, *new: torch.Tensor) -> Any:
    kept = optimizer.kept.setdefault(parameter, [])
    kept += new
    return kept


def as_views(optimizer: Any, parameter: Any, *new: torch.Tensor) -> Any:
    """Keeps views of the gradients: slices, without history, in the same shape."""
    return beside_its_state(
        optimizer, parameter, *(gradient[:].detach().view_as(gradient) for gradient in new)
    )


@pytest.mark.guarantee(
    "The trajectory",
    "Optimizers that keep their gradients, cumulative averages and norms of many numbers match a plain loop.",
)
@pytest.mark.parametrize(("reduction", "bits"), [("fast", 64), ("reproducible", 64), ("reproducible", 32)])
@pytest.mark.parametrize("since", [1, 2, 5])
@pytest.mark.parametrize("keep", [in_state, in_a_tuple, beside_its_state, as_views])
def test_optimizer_that_keeps_its_gradients_gets_its_own_copies(
    keep: Keep, since: int, reduction: str, bits: int
) -> None:
    one, other = net(), net()
    ours(one, Optimistic(one.parameters(), keep, since), reduction=reduction, reduction_bits=bits)
    plain(other, Optimistic(other.parameters(), keep, since))
    for mine, right in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, right)


def test_gradients_kept_by_an_optimizer_hook_stay_unchanged() -> None:
    model, seen = net(), list[tuple[torch.Tensor, torch.Tensor]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def keep(*_: Any) -> None:
        seen.extend((p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None)

    optimizer.register_step_post_hook(keep)
    ours(model, optimizer)
    assert len(seen) == STEPS * 4
    for kept, was in seen:
        torch.testing.assert_close(kept, was, rtol=0, atol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, foreach=False, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
        lambda p: torch.optim.Rprop(p),
        lambda p: torch.optim.Adagrad(p),
    ],
)
@pytest.mark.parametrize("options", [{}, {"reduction": "reproducible", "reduction_bits": 32}])
def test_borrowed_gradient_memory_is_reused_when_nothing_is_kept(
    make: Callable[[Any], Any], options: dict[str, Any]
) -> None:
    model, lent = net(), list[list[int]]()
    optimizer = make(list(model.parameters()))

    def note(*_: Any) -> None:
        lent.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])

    optimizer.register_step_pre_hook(note)
    ours(model, optimizer, **options)
    assert lent == [lent[0]] * STEPS


@pytest.mark.guarantee(
    "The trajectory",
    "Optimizers that keep their gradients, cumulative averages and norms of many numbers match a plain loop.",
)
@pytest.mark.parametrize("reduction", ["fast", "reproducible"])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_cumulative_batchnorm_statistics_match_a_plain_loop(kind: type[nn.Module], reduction: str) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(kind(6, momentum=None), nn.Linear(6, 6))

    one, other = made(), made()
    if kind is nn.SyncBatchNorm:  # by itself it needs a GPU
        other = nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 6))
        other.load_state_dict(one.state_dict())
        one[0].forward = nn.BatchNorm1d.forward.__get__(one[0])  # type: ignore[index, attr-defined]
    ours(one, torch.optim.SGD(one.parameters(), lr=0.01), reduction=reduction)
    plain(other, torch.optim.SGD(other.parameters(), lr=0.01))
    for name, right in other.named_buffers():
        torch.testing.assert_close(one.get_buffer(name), right, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.guarantee(
    "The trajectory",
    "Optimizers that keep their gradients, cumulative averages and norms of many numbers match a plain loop.",
)
@pytest.mark.parametrize("layers", [3, 100])
def test_norm_of_many_numbers_is_as_exact_as_torchs(layers: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(layers)])
    directions = [torch.randn(p.shape) for p in model.parameters()]
    step = recover.Step(World(), model, torch.optim.SGD(model.parameters(), lr=1.0), 1)  # type: ignore[arg-type]
    for _ in step.microbatches(range(1)):
        step.backward(sum((p * d).sum() for p, d in zip(model.parameters(), directions, strict=True)))  # type: ignore[arg-type]
    right = torch.stack([d.double().square().sum() for d in directions]).sum().sqrt().item()
    assert step.grad_norm == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize(
    ("loader", "words", "lost"),
    [
        (lambda data: DataLoader(data, batch_size=3), "batch_size=3)", ""),
        (
            lambda data: DataLoader(data, batch_size=3, shuffle=True),
            "batch_size=3, shuffle=True, seed=0)",
            "",
        ),
        (
            lambda data: DataLoader(data, batch_size=3, sampler=SubsetRandomSampler(range(4))),
            "batch_size=3)",
            "SubsetRandomSampler",
        ),
        (
            lambda data: DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 5, False)),
            "batch_size=5)",
            "",
        ),
        (lambda data: DataLoader(data, batch_sampler=[[0, 1], [2]]), "batch_size=1)", "list"),
        (lambda data: DataLoader(data, batch_size=None), "batch_size=1", ""),
    ],
)
def test_dataloader_remedy_names_settings_it_does_not_carry_over(loader: Any, words: str, lost: str) -> None:
    told = dataloader_remedy(loader(list(range(8)))) or ""
    assert words in told
    assert (f"its {lost} is not carried over" in told) if lost else ("carried over" not in told)


def test_dropin_is_available_without_its_own_import() -> None:
    assert recover.dropin.DDPGradients
