"""A run that was saved and resumed twice has the bits of an uninterrupted one, whatever its optimizer and model
hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_world import torch_world_of_one
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel

from recover.checkpoint.directory import CheckpointError
from recover.checkpoint.tensors import Tensors

STEPS, CUTS = 9, (3, 6)
INPUTS = [torch.randn(4, 6, generator=torch.Generator().manual_seed(index)) for index in range(STEPS)]
Make = Callable[[], nn.Module]
Optimize = Callable[[nn.Module], torch.optim.Optimizer]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


class Odd(nn.Module):
    """A model with a scalar parameter, an empty, a transposed, a complex, a tied and an unused one, and with
    buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(torch.randn(6, 6).t())
        self.spin = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.unused = nn.Linear(3, 3)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.register_buffer("cache", torch.empty(0))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x @ self.turned))) * self.scale + (x * self.spin).abs()


class Masters(torch.optim.Optimizer):
    """A custom optimizer: master weights and momentum with more digits than the parameters, in nested state, and a
    step count that is a plain number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "nesterov": True})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {
                        "master": parameter.double(),
                        "of": {"momentum": parameter.double() * 0},
                        "n": 0,
                    }
                state["n"] += 1
                state["of"]["momentum"].mul_(0.9).add_(parameter.grad.double())
                state["master"].sub_(group["lr"] * state["of"]["momentum"] / state["n"])
                parameter.copy_(state["master"])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.AdamW(
        [
            {"params": [first], "lr": torch.tensor(0.03)},
            {"params": []},
            {"params": others, "weight_decay": 0.3},
        ],
        lr=0.01,
    )


def named(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9, nesterov=True)


def by_kind(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.01)
    return optimizer


OF_TORCH = ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
OPTIMIZERS: dict[str, Optimize] = {
    "AdamW": adamw,
    "amsgrad, fused": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True, fused=True),
    "foreach, maximize": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True, maximize=True),
    "groups, one of them empty": in_groups,
    "named parameters": named,
    "masters": lambda m: Masters(m.parameters()),
    **{name: partial(by_kind, getattr(torch.optim, name)) for name in OF_TORCH},
}


def train(
    make: Make, optimize: Optimize, place: Path | None, frozen: tuple[int, ...] = ()
) -> list[torch.Tensor]:
    """Train for `STEPS` steps. With a `place`, the run is cut into pieces, each of which begins with a new model and a
    new optimizer and loads the checkpoint of the one before."""
    done = 0
    for end in (*CUTS, STEPS) if place else (STEPS,):
        torch.manual_seed(0 if done == 0 else 1)
        model = make()
        optimizer, last = optimize(model), list(model.children() or [model])[-1]
        tensors = Tensors(model, optimizer, 1)
        last.requires_grad_(done not in frozen)
        if done and place:
            tensors.load(place / str(done), ["part-0.safetensors"])
        while done < end:
            last.requires_grad_(done not in frozen)
            kind = next(model.parameters()).dtype
            outputs = model(INPUTS[done].to(kind if not kind.is_complex else torch.float32))
            outputs.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        if place:
            tensors.write(place / str(done), tensors.snapshot())
    return [p.detach() for p in model.parameters()]


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left, right), (left - right).abs().max()


@pytest.mark.guarantee(
    "The trainer",
    "A run saved and resumed twice has the bits of an uninterrupted one with every torch optimizer and "
    "custom ones, and saving takes no optimizer step.",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_state_keeps_every_bit_over_two_resumes(
    optimizer: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    make: Make = lambda: net().to(dtype)  # noqa: E731
    optimize = OPTIMIZERS[optimizer]
    assert_same(train(make, optimize, tmp_path), train(make, optimize, None))


@pytest.mark.guarantee(
    "The trainer",
    "A run saved and resumed twice has the bits of an uninterrupted one with every torch optimizer and "
    "custom ones, and saving takes no optimizer step.",
)
@pytest.mark.parametrize("optimizer", ["AdamW", "named parameters", "masters"])
def test_parameters_of_every_kind_and_unused_ones_are_resumed(optimizer: str, tmp_path: Path) -> None:
    optimize = OPTIMIZERS[optimizer]
    if optimizer == "masters":
        optimize = lambda m: Masters([p for p in m.parameters() if not p.is_complex()])  # noqa: E731
    assert_same(train(Odd, optimize, tmp_path), train(Odd, optimize, None))


@pytest.mark.guarantee(
    "The trainer",
    "A run saved and resumed twice has the bits of an uninterrupted one with every torch optimizer and "
    "custom ones, and saving takes no optimizer step.",
)
@pytest.mark.parametrize("frozen", [(2, 3, 4), (3,), (5, 6, 7), (0, 1, 2, 3, 4, 5)])
def test_moments_of_parameters_frozen_at_resume_are_kept(frozen: tuple[int, ...], tmp_path: Path) -> None:
    assert_same(train(net, adamw, tmp_path, frozen), train(net, adamw, None, frozen))


@pytest.mark.guarantee(
    "The trainer",
    "A run saved and resumed twice has the bits of an uninterrupted one with every torch optimizer and "
    "custom ones, and saving takes no optimizer step.",
)
def test_save_takes_no_optimizer_step_and_runs_no_hook(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    tensors = Tensors(model, optimizer, 1)
    tensors.write(tmp_path, tensors.snapshot())
    tensors.load(tmp_path, ["part-0.safetensors"])
    assert not steps
    assert not optimizer.state


def test_checkpoint_names_are_those_of_the_unwrapped_model(tmp_path: Path) -> None:
    with torch_world_of_one():
        wrapped = DistributedDataParallel(net())
        optimizer = adamw(wrapped)
        wrapped(INPUTS[0]).sum().backward()
        optimizer.step()
        tensors = Tensors(torch.compile(wrapped, backend="eager"), optimizer, 1)  # type: ignore[arg-type]
        tensors.write(tmp_path, tensors.snapshot())
    model = net()
    here = adamw(model)
    Tensors(model, here, 1).load(tmp_path, ["part-0.safetensors"])
    for mine, theirs in zip(here.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = net()
    tensors = Tensors(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    tensors.write(tmp_path, tensors.snapshot())
    with pytest.raises(CheckpointError, match="checkpoint of another optimizer"):
        Tensors(model, adamw(model), 1).load(tmp_path, ["part-0.safetensors"])


class Exports(torch.optim.SGD):
    """An optimizer that keeps its momentum in bfloat16, and has it in float32 in its state_dict."""

    def state_dict(self) -> dict[str, Any]:
        told = super().state_dict()
        told["state"] = {
            key: {"momentum_buffer": state["momentum_buffer"].float()} for key, state in told["state"].items()
        }
        return told

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16()

    def step(self, closure: Any = None) -> None:
        for state in self.state.values():
            assert state["momentum_buffer"].dtype is torch.bfloat16
            state["momentum_buffer"] = state["momentum_buffer"].float()
        super().step(closure)
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16()


class Keys(torch.optim.SGD):
    """An optimizer that holds its state under keys of every kind."""

    KEYS = ("0", 0, "a.b", "a", 7, "plain")

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            for key in self.KEYS:
                state.setdefault("of", {}).setdefault(1, {}).setdefault(key, 0)
                state["of"][1][key] += 1
                state[key] = state.get(key, torch.zeros(2)) + 1
                with torch.no_grad():
                    parameter.sub_(0.001 / state["of"][1][key] / state[key].sum())


@pytest.mark.parametrize("kind", [Exports, Keys])
def test_custom_optimizer_state_is_restored_unchanged(kind: Any, tmp_path: Path) -> None:
    optimize: Optimize = lambda m: kind(m.parameters(), lr=0.01, momentum=0.9)  # noqa: E731
    assert_same(train(net, optimize, tmp_path), train(net, optimize, None))


def test_row_averages_of_a_sharded_parameter_are_sharded_again(tmp_path: Path) -> None:
    with torch_world_of_one():
        models = [net() for _ in range(2)]
        for model in models:
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        there, here = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
        for parameter in (p for p in models[0].parameters() if p.dim() > 1):
            there.state[parameter] = {
                "rows": parameter.detach() * 1,
                "averages": (parameter.detach() ** 2).mean(-1, keepdim=True),
                "columns": (parameter.detach() ** 2).mean(0).redistribute(placements=[Replicate()]),  # type: ignore[attr-defined]
                "n": torch.tensor(3.0),
            }
        Tensors(models[0], there, 1).write(tmp_path, Tensors(models[0], there, 1).snapshot())
        Tensors(models[1], here, 1).load(tmp_path, ["part-0.safetensors"])
        matrices = (p for p in models[1].parameters() if p.dim() > 1)
        for parameter, state in zip(matrices, there.state.values(), strict=True):
            mine = here.state[parameter]
            assert mine.keys() == state.keys()
            for key, value in state.items():
                assert type(mine[key]) is type(value) or not value.dim(), key
                assert (mine[key] + value).shape == value.shape  # torch can add them
