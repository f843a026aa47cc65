"""A list of optimizers in one Step: the numbers of a plain loop, whole checkpoints, joins, and limits by group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_world import World
from torch import nn
from torch.optim import lr_scheduler

import recover
from recover.checkpoint.tensors import Tensors
from recover.gradients.optimizers import groups_of, optimizers_of
from recover.gradients.replica_interface import PlainReplica, mark
from recover.step.joining.joinable import undeclared_schedulers
from recover.step.joining.parcel import OtherStateError, Parcel
from recover.step.schedulers import as_one_scheduler

BATCH, STEPS = 4, 6
INPUTS = [
    torch.randn(8, 6, generator=torch.Generator().manual_seed(index)) for index in range(2 * BATCH * STEPS)
]
Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))


class Listed(torch.optim.Optimizer):
    """An optimizer with lists of tensors in its state, under keys of two types."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                last, calls = state.setdefault(0, [torch.zeros_like(parameter), {"calls": 0}])
                calls["calls"] += 1
                last.mul_(0.9).add_(parameter.grad)
                parameter.sub_(group["lr"] * last / calls["calls"])


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def vectors(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim != 2]


def muon_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Muon(matrices(model), lr=0.02), torch.optim.AdamW(vectors(model), lr=0.01)]


def sgd_adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *others = model.parameters()
    return [
        torch.optim.SGD([first], lr=0.05, momentum=0.9),
        torch.optim.Adam([{"params": others[::2], "lr": 0.002}, {"params": others[1::2]}], lr=0.01),
    ]


def three(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, second, *others = matrices(model)
    return [
        Listed([first]),
        torch.optim.Muon([{"params": [second]}, {"params": others, "lr": 0.01}], lr=0.02),
        torch.optim.AdamW(vectors(model), lr=0.01),
    ]


KINDS: dict[str, Make] = {"Muon + AdamW": muon_adamw, "SGD + Adam": sgd_adam, "three": three}


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - inputs).square().mean()


def decays(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """A scheduler for each optimizer but the last."""
    return [
        lr_scheduler.ExponentialLR(each, 0.9 - 0.1 * number) for number, each in enumerate(optimizers[:-1])
    ]


class Run:
    """A script of a user's own with several optimizers."""

    def __init__(self, make: Make, seed: int = 0, **options: Any) -> None:
        self.model = net(seed)
        self.optimizers = make(self.model)
        self.schedulers = decays(self.optimizers)
        self.step = recover.Step(
            World(),  # type: ignore[arg-type]
            self.model,
            self.optimizers,
            BATCH,
            scheduler=self.schedulers,
            **options,
        )

    def take(self, until: int) -> None:
        while self.step.index < until:
            for inputs in self.step.microbatches(INPUTS):
                self.step.backward(loss_of(self.model, inputs))

    def state(self) -> list[Any]:
        return [
            dict(self.model.named_parameters()),
            *(each.state_dict() for each in (*self.optimizers, *self.schedulers)),
        ]


def plain(make: Make, clip: Any = None) -> nn.Module:
    """Train the same in plain PyTorch."""
    model = net()
    optimizers = make(model)
    schedulers = decays(optimizers)
    for number in range(STEPS):
        for slot in range(BATCH):
            (loss_of(model, INPUTS[number * BATCH + slot]) / BATCH).backward()
        groups = [group["params"] for each in optimizers for group in each.param_groups]
        limits = zip(groups, clip, strict=True) if isinstance(clip, list) else [(model.parameters(), clip)]
        for parameters, limit in limits:
            if limit is not None:
                nn.utils.clip_grad_norm_(parameters, limit)
        for each in optimizers:
            each.step()
            each.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    return model


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.guarantee(
    "The trajectory",
    "A step with a list of optimizers takes the step of a plain loop that calls each of them, and clips each "
    "parameter group by its own norm where `clip` is a list.",
)
@pytest.mark.parametrize("reduction", ["fast", "reproducible"])
@pytest.mark.parametrize("clip", [None, 0.1, "by group"])
@pytest.mark.parametrize("kind", KINDS)
def test_several_optimizers_match_a_plain_loop(kind: str, clip: Any, reduction: str) -> None:
    make = KINDS[kind]
    if clip == "by group":
        limits: list[float | None] = [0.05, None, 0.02, 0.01]
        clip = limits[: len(groups_of(make(net())))]
    run, right = Run(make, clip=clip, reduction=reduction), plain(make, clip)
    run.take(STEPS)
    for mine, other in zip(run.model.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_gradient_norm_of_a_clipped_group_is_that_of_its_own_gradients() -> None:
    """Steps of plain SGD show the gradients: one group is clipped to its limit, the others are not."""
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizers = [torch.optim.SGD(matrices(model), lr=1.0), torch.optim.SGD(vectors(model), lr=1.0)]
    step = recover.Step(World(), model, optimizers, BATCH, clip=[0.01, None])  # type: ignore[arg-type]
    for inputs in step.microbatches(INPUTS):
        step.backward(loss_of(model, inputs))
    moves = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    norms = [torch.stack([m.norm() for m in moves if (m.ndim == 2) is kind]).norm() for kind in (True, False)]
    assert norms[0].item() == pytest.approx(0.01, rel=1e-3)
    assert norms[1].item() > 0.1
    assert step.grad_norm > norms[1].item(), "the norm of a step is that of the whole gradient"


@pytest.mark.guarantee(
    "The trainer",
    "A run with several optimizers that was saved and resumed has the bits of an uninterrupted one, and a "
    "checkpoint names the state by parameter, whichever optimizer holds it.",
)
@pytest.mark.parametrize("kind", KINDS)
def test_several_optimizers_resume_with_the_bits_of_an_unbroken_run(kind: str, tmp_path: Path) -> None:
    calm = Run(KINDS[kind])
    calm.take(STEPS)
    first = Run(KINDS[kind])
    first.take(STEPS // 2)
    recover.save(first.step, tmp_path)
    second = Run(KINDS[kind], seed=1)
    recover.resume(second.step, tmp_path)
    assert_same(second.state(), first.state())
    second.take(STEPS)
    assert_same(second.state(), calm.state())


def test_checkpoint_of_one_optimizer_resumes_under_a_list_of_it(tmp_path: Path) -> None:
    """Checkpoint files store optimizer state by parameter name. Checkpoints of older versions still load, and a
    checkpoint of one optimizer loads into two that share its parameters."""

    def train(model: nn.Module, optimizers: Any, numbers: range) -> None:
        for number in numbers:
            loss_of(model, INPUTS[number]).backward()
            for each in optimizers_of(optimizers):
                each.step()
                each.zero_grad()

    one = net()
    adamw = torch.optim.AdamW(one.parameters(), lr=0.01)
    train(one, adamw, range(3))
    tensors = Tensors(one, adamw, 1)
    written = tensors.write(tmp_path, tensors.snapshot())
    train(one, adamw, range(3, 6))
    two = net(seed=1)
    both = [torch.optim.AdamW(each(two), lr=0.5) for each in (vectors, matrices)]
    Tensors(two, both, 1).load(tmp_path, list(written.files))
    train(two, both, range(3, 6))
    assert_same(list(two.parameters()), list(one.parameters()))


@pytest.mark.guarantee(
    "Joining",
    "A joining replica receives the state of each of several optimizers and of their schedulers, to the bit.",
)
@pytest.mark.parametrize("kind", KINDS)
def test_joining_replica_receives_every_optimizer_and_scheduler(kind: str) -> None:
    there, here = Run(KINDS[kind]), Run(KINDS[kind], seed=1)
    there.take(3)
    giver, taker = (Parcel(*run.step._engine.handover._state) for run in (there, here))
    head, parts = giver.pack({})
    for mine, theirs in zip(taker.open(head), parts, strict=True):
        mine.copy_(theirs)
    taker.install()
    assert_same(here.state(), there.state())
    here.step.load_state_dict(there.step.state_dict())
    for run in (there, here):
        run.take(STEPS)
    assert_same(here.state(), there.state())


def test_replica_with_its_groups_in_other_optimizers_is_refused() -> None:
    model, other = net(), net()
    one, two, *rest = matrices(other)
    split = [torch.optim.SGD([one], lr=0.1), torch.optim.SGD([two, *rest, *vectors(other)], lr=0.1)]
    head, _ = Parcel(model, [torch.optim.SGD(model.parameters(), lr=0.1)], None, {}).pack({})
    with pytest.raises(OtherStateError, match="parameters in each group of the optimizer are"):
        Parcel(other, split, None, {}).open(head)


@pytest.mark.parametrize("full", [False, True])
def test_state_of_every_optimizer_enters_the_fingerprint(full: bool) -> None:
    """Learning rates are compared in every vote, moments where all state is compared."""

    def fingerprint(run: Run) -> int:
        return run.step._engine.compared.fingerprint(1, full).value

    runs = [Run(muon_adamw) for _ in range(2)]
    for run in runs:
        run.take(2)
    assert fingerprint(runs[0]) == fingerprint(runs[1])
    if full:
        optimizer = runs[1].optimizers[1]
        optimizer.state[vectors(runs[1].model)[0]]["exp_avg"].view(-1)[0] += 1e-4
    else:
        runs[1].optimizers[1].param_groups[0]["lr"] *= 2
    assert fingerprint(runs[0]) != fingerprint(runs[1])


def test_parameters_of_one_optimizer_are_frozen_and_unfrozen_between_steps() -> None:
    run, right = Run(muon_adamw, clip=[0.1, 0.1]), net()
    for parameter in matrices(run.model):
        parameter.requires_grad_(False)
    run.take(2)
    for mine, start in zip(matrices(run.model), matrices(right), strict=True):
        assert_same(mine.detach(), start.detach())
    for parameter in matrices(run.model):
        parameter.requires_grad_()
    run.take(4)
    assert not torch.equal(matrices(run.model)[0], matrices(right)[0])


def test_group_added_to_the_second_optimizer_asks_for_its_limit() -> None:
    model = net()
    late, *others = vectors(model)
    late.requires_grad_(False)
    optimizers = [torch.optim.SGD(matrices(model), lr=0.1), torch.optim.SGD(others, lr=0.1)]
    step = recover.Step(World(), model, optimizers, BATCH, clip=[0.1, None])  # type: ignore[arg-type]
    late.requires_grad_()
    optimizers[1].add_param_group({"params": [late]})
    with pytest.raises(ValueError, match=r"clip has 2 entries, and there are 3 .* \(SGD 1, SGD 2\)"):
        next(iter(step.microbatches(INPUTS)))


@pytest.mark.guarantee(
    "User code",
    "Parameters that two optimizers of a step hold, or none, and limits that do not fit their groups are refused "
    "by name, before the first step.",
)
@pytest.mark.parametrize(
    ("make", "options", "told"),
    [
        (
            lambda m: [torch.optim.Muon(matrices(m)), torch.optim.AdamW(m.parameters())],
            {},
            r"parameter 0.weight is held by optimizer 0 \(Muon\) and by optimizer 1 \(AdamW\), .* to one of them",
        ),
        (
            lambda m: [torch.optim.Muon(matrices(m)), torch.optim.AdamW(vectors(m)[1:])],
            {},
            "parameter 0.bias of the model would be trained, and the optimizer does not hold them; add",
        ),
        (lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)] * 2, {}, "held by optimizer 0 .* optimizer 1"),
        (lambda m: [], {}, r"Sequential, list of \(\); give it .* or a list of them"),
        (
            lambda m: [torch.optim.SGD(m.parameters(), lr=0.1), m],
            {},
            r"list of \(SGD, Sequential\); give it",
        ),
        (
            muon_adamw,
            {"clip": [1.0]},
            r"clip has 1 entries, .* 2 parameter groups \(Muon 1, AdamW 1\); give one",
        ),
        (muon_adamw, {"clip": [1.0, -1.0]}, r"clip\[1\] is -1.0; it must be a positive number, or None"),
        (muon_adamw, {"clip": [1.0, "1"]}, r"clip\[1\] is '1'; it must be a positive number, or None"),
        (muon_adamw, {"clip": [True, 1.0]}, r"clip\[0\] is True"),
        (muon_adamw, {"scheduler": [0.1]}, "scheduler is float; give one"),
        (
            lambda m: [torch.optim.LBFGS(matrices(m)), torch.optim.AdamW(vectors(m))],
            {},
            "LBFGS calls the model again inside of its step",
        ),
    ],
)
def test_optimizers_and_limits_that_do_not_fit_are_refused_by_name(
    make: Any, options: dict[str, Any], told: str
) -> None:
    model = net()
    with pytest.raises((TypeError, ValueError), match=told):
        recover.Step(World(), model, make(model), BATCH, **options)  # type: ignore[arg-type]


def test_scheduler_of_any_optimizer_is_found_unless_it_was_given() -> None:
    optimizers = muon_adamw(net())
    scheduler = lr_scheduler.StepLR(optimizers[1], 3)
    assert undeclared_schedulers(optimizers, []) == [scheduler]
    run = Run(muon_adamw)
    assert run.step._engine.joinable.obstacle() is None


def test_calls_on_the_second_optimizer_are_noticed_like_those_on_the_first() -> None:
    run = Run(muon_adamw)
    run.take(1)
    matrices(run.model)[0].grad = torch.ones_like(matrices(run.model)[0])
    with pytest.warns(UserWarning, match=r"optimizer.step\(\) was called outside of a step"):
        run.optimizers[1].step()
    matrices(run.model)[0].grad = None
    with pytest.raises(RuntimeError, match="GradScaler was given the optimizer of a Step"):
        torch.amp.GradScaler("cpu").step(run.optimizers[1])
    run.schedulers[0].step()
    with pytest.warns(UserWarning, match=r"scheduler.step\(\) was called since the last step"):
        run.take(2)


def test_schedulers_of_another_number_are_not_loaded() -> None:
    run, other = Run(three), Run(muon_adamw)
    scheduler = run.step.state().scheduler
    with pytest.raises(ValueError, match=r"the state is of 1 scheduler\(s\), and Step was given 2; give the"):
        scheduler.load_state_dict(other.step.state().scheduler.state_dict())


def test_clip_by_group_is_refused_where_ranks_hold_different_parameters() -> None:
    class Stages(PlainReplica):
        peers_hold_all_buffers = False

    model = net()
    mark(model, Stages())
    with pytest.raises(ValueError, match=r"recover.threed hold different parameters.*give clip one number"):
        recover.Step(World(), model, muon_adamw(model), BATCH, clip=[0.1, None])  # type: ignore[arg-type]


def test_list_of_one_scheduler_has_the_state_of_that_scheduler() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    assert as_one_scheduler([scheduler]) is scheduler
