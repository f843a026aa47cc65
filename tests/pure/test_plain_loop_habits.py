"""Left-overs of a plain loop are reported once, with the remedy; ordinary loops cause no report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # imported before the functions are patched

from recover.step.loop.habits import Habits

COUNTS = (6, 3)  # B, and this replica's share


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Linear(2, 1)


@pytest.fixture
def habits(model: torch.nn.Module) -> Habits:
    return Habits(model, torch.optim.SGD(model.parameters(), lr=0.1))


def said(*acts: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for act in acts:
            act()
    return [str(warning.message) for warning in caught]


def backward(habits: Habits, loss: torch.Tensor) -> None:
    with habits.backward(loss, COUNTS):
        loss.backward()


def ones(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.ones(6, 2))


@pytest.mark.guarantee(
    "Trained parameters", "Leftovers of a plain loop are reported once, and ordinary loops cause no report."
)
@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_, torch.nn.utils.clip_grad_norm_])
def test_manual_clipping_is_reported_once_and_only_for_the_trained_model(
    model: torch.nn.Module, habits: Habits, clip: Callable[..., object]
) -> None:
    other = torch.nn.Linear(2, 1)
    ones(other).sum().backward()
    assert said(lambda: clip(other.parameters(), 1.0)) == []
    assert other.weight.grad.abs().max() <= 1.0, "it was not passed on"

    def by_hand(parameters: object) -> None:
        if clip is clip_grad_value_:
            with pytest.raises(RuntimeError, match="empty"):  # torch's error without gradients
                clip(parameters, 1.0)
        else:
            clip(parameters, 1.0)

    (line,) = said(*[lambda: by_hand(model.parameters())] * 2, lambda: by_hand(model.weight))
    assert "give Step clip=" in line
    with habits.updating():  # a hook of the optimizer, when there are gradients
        assert said(lambda: by_hand(model.parameters())) == []


@pytest.mark.guarantee(
    "Trained parameters", "Leftovers of a plain loop are reported once, and ordinary loops cause no report."
)
def test_manual_optimizer_step_is_reported_once_except_during_checkpoints(
    model: torch.nn.Module, habits: Habits
) -> None:
    optimizer = habits.optimizers[0]
    with habits.updating():
        assert said(optimizer.step) == []
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert said(optimizer.step) == []
    optimizer.zero_grad()
    (line,) = said(optimizer.step, optimizer.step)
    assert "outside of a step" in line


@pytest.mark.guarantee(
    "Trained parameters", "Leftovers of a plain loop are reported once, and ordinary loops cause no report."
)
def test_scheduler_stepped_twice_is_reported_once_except_when_loaded(habits: Habits) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(habits.optimizers[0], 1)
    warnings.simplefilter("ignore")
    scheduler.step()  # before the first step, as in a resumed run
    assert said(*[lambda: habits.step_scheduler(scheduler)] * 3) == []
    state = scheduler.state_dict()
    scheduler.step()
    lines = said(
        lambda: habits.step_scheduler(scheduler), scheduler.step, lambda: habits.step_scheduler(scheduler)
    )
    assert [line for line in lines if "scheduler" in line] == lines
    assert len(lines) == 1
    assert set(state) == set(scheduler.state_dict()), "nothing of ours is in what is saved"


MEANS = {
    "mean": lambda y: y.square().mean(),
    "loss": lambda y: F.mse_loss(y, torch.ones_like(y)),
    "two": lambda y: y.mean() + y.square().mean(),
}


@pytest.mark.guarantee(
    "Trained parameters", "Leftovers of a plain loop are reported once, and ordinary loops cause no report."
)
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("count", [6, 3])
def test_division_by_the_microbatch_count_is_reported_once(
    model: torch.nn.Module, habits: Habits, mean: str, count: int
) -> None:
    divisions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda loss: loss / count,
        lambda loss: loss * (1 / count),
        lambda loss: (1 / count) * loss,
        lambda loss: loss.div(torch.tensor(float(count))),
    ]
    for divide in divisions:
        fresh = Habits(model, habits.optimizers[0])
        act = lambda divide=divide, fresh=fresh: backward(fresh, divide(MEANS[mean](ones(model))))  # noqa: E731
        (line,) = said(act, act)
        assert f"divided by {count}" in line


@pytest.mark.guarantee(
    "Trained parameters", "Leftovers of a plain loop are reported once, and ordinary loops cause no report."
)
def test_other_divisions_are_not_reported(model: torch.nn.Module, habits: Habits) -> None:
    losses = [
        lambda: ones(model).sum() / 6,  # the mean over six rows
        lambda: F.mse_loss(ones(model), torch.ones(6, 1), reduction="sum") / 6,
        lambda: ones(model).mean() / 5,
        lambda: ones(model).mean() * 6,
        lambda: ones(model).mean() / ones(model).mean().square(),
        lambda: ones(model).mean() * 0,
    ]
    for loss in losses:
        assert said(lambda loss=loss: backward(habits, loss())) == []


@pytest.fixture
def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


@pytest.mark.guarantee(
    "Trained parameters", "A loss scaled by GradScaler is refused whatever was done to it afterwards."
)
def test_scaled_loss_is_refused_whatever_is_done_to_it(
    model: torch.nn.Module, habits: Habits, scaler: torch.amp.GradScaler
) -> None:
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda loss: scaler.scale(loss),
        lambda loss: scaler.scale(loss) / 1024,
        lambda loss: scaler.scale([loss, loss])[1] + loss,
        lambda loss: sum(scaler.scale(iter([loss, loss]))),
        lambda loss: torch.stack([scaler.scale(loss / 6)]).mean() * 2,
    ]
    for way in ways:
        with pytest.raises(RuntimeError, match=r"was scaled.*bf16 autocast"):
            backward(habits, way(ones(model).mean()))
    backward(habits, ones(model).mean())


@pytest.mark.guarantee(
    "Trained parameters", "A loss scaled by GradScaler is refused whatever was done to it afterwards."
)
def test_round_with_scaled_losses_is_refused(
    model: torch.nn.Module, habits: Habits, scaler: torch.amp.GradScaler
) -> None:
    def record() -> None:
        with habits.backward(
            torch.zeros(2), COUNTS
        ):  # without a graph: a pipeline has run its backward passes
            pass

    habits.handed_out()
    record()
    scaler.scale(ones(model).mean()).backward()
    with pytest.raises(RuntimeError, match="round was scaled"):
        record()
    habits.handed_out()
    record()


def test_grad_scaler_is_refused_for_the_optimizer_of_a_step_only(
    model: torch.nn.Module, habits: Habits, scaler: torch.amp.GradScaler
) -> None:
    for act in (scaler.step, scaler.unscale_):
        with pytest.raises(RuntimeError, match="optimizer of a Step"):
            act(habits.optimizers[0])
    other = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    scaler.scale(ones(other).mean()).backward()
    scaler.unscale_(optimizer)
    before = other.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, other.weight)
    off = torch.amp.GradScaler("cpu", enabled=False)
    backward(habits, off.scale(ones(model).mean()))


@pytest.fixture(autouse=True)
def warnings_as_they_were() -> Iterator[None]:
    with warnings.catch_warnings():
        yield
