"""Warnings of scripts at checkpoints and after a resume: unsaved schedulers, streams with other arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lone_world import BATCH, World
from torch.optim import lr_scheduler

import recover
from recover.job.grid import Grid

ITEMS = [torch.tensor([float(number)]) for number in range(64)]
SAME = {"batch_size": 2, "shuffle": True, "seed": 3}


def make(world: World | None = None, **options: Any) -> tuple[recover.Step, torch.nn.Module]:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    return recover.Step(world or World(), model, optimizer, BATCH, **options), model  # type: ignore[arg-type]


def train(step: recover.Step, model: torch.nn.Module, stream: Any, steps: int) -> None:
    for _ in range(steps):
        for batch in step.microbatches(stream):
            step.backward(model(batch).square().mean())


class WithSettings:
    """A stream of the user's own, with attributes of its own."""

    settings, order = object(), object()

    def __getitem__(self, index: int) -> torch.Tensor:
        return ITEMS[index]


def resumed(place: Path, before: Any, after: Any) -> None:
    """Train two steps with one stream, save, resume, and train two more with another stream."""
    step, model = make()
    train(step, model, before, 2)
    recover.save(step, place)
    step, model = make()
    assert recover.resume(step, place) is not None
    train(step, model, after, 2)


@pytest.mark.guarantee(
    "State and samples", "A script that resumes with another `recover.stream` is told which argument differs."
)
@pytest.mark.parametrize(
    ("items", "other", "said"),
    [
        (64, {"seed": 4}, "seed=4 instead of seed=3"),
        (64, {"batch_size": 4}, "batch_size=4 instead of batch_size=2"),
        (64, {"shuffle": False}, "shuffle=False instead of shuffle=True"),
        (40, {}, "items=40 instead of items=64"),
    ],
)
def test_another_stream_after_a_resume_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], items: int, other: dict[str, Any], said: str
) -> None:
    resumed(tmp_path, recover.stream(ITEMS, **SAME), recover.stream(ITEMS[:items], **{**SAME, **other}))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "another stream" in line]
    assert f"resumed after step 2 with another stream ({said})" in line
    assert "the same arguments" in line


def test_same_stream_and_a_stream_of_the_users_own_are_not_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = recover.stream(ITEMS, **SAME)
    resumed(tmp_path / "same", same, recover.stream(ITEMS, **SAME, workers=0))
    resumed(tmp_path / "own", ITEMS, ITEMS)
    resumed(tmp_path / "other kind", same, ITEMS)
    resumed(tmp_path / "own settings", WithSettings(), WithSettings())
    numpys = recover.stream(ITEMS, batch_size=np.int64(2), shuffle=True, seed=np.int64(3))  # type: ignore[arg-type]
    resumed(tmp_path / "numpy", numpys, same)
    assert "another stream" not in capsys.readouterr().out


SAVES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "not at all": lambda scheduler: {},
    "object": lambda scheduler: {"schedule": scheduler},
    "state": lambda scheduler: {"schedule": scheduler.state_dict()},
}


@pytest.mark.guarantee(
    "State and samples", "A scheduler that checkpoints of a script lack is named at the first of them."
)
@pytest.mark.parametrize("saved", SAVES)
def test_scheduler_that_a_checkpoint_lacks_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: str
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done))
    step = recover.Step(World(), model, optimizer, BATCH)  # type: ignore[arg-type]
    for _ in range(2):
        train(step, model, ITEMS, 1)
        scheduler.step()
        recover.save(step, tmp_path, SAVES[saved](scheduler))
    lines = [line for line in capsys.readouterr().out.splitlines() if "lack" in line]
    assert len(lines) == (saved == "not at all"), lines
    assert all("LambdaLR" in line and 'extra={"scheduler": scheduler}' in line for line in lines)


@pytest.mark.parametrize("saved", SAVES)
def test_resume_names_its_checkpoint_and_a_scheduler_that_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: str
) -> None:
    """The warning comes before the next save: the resumed run trains with another learning rate from its first step
    on."""
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done))
        step = recover.Step(World(), model, optimizer, BATCH)  # type: ignore[arg-type]
        capsys.readouterr()
        if recover.resume(step, tmp_path) is None:
            assert not capsys.readouterr().out
            train(step, model, ITEMS, 1)
            scheduler.step()
            recover.save(step, tmp_path, SAVES[saved](scheduler))
    first, *others = capsys.readouterr().out.splitlines()
    place = tmp_path / "checkpoints" / "step-1"
    assert f"resumed after step 1 from {place}" in first
    assert len(others) == (saved == "not at all"), others
    assert all(f"{place} lacks the LambdaLR" in line and "begins again" in line for line in others)


@pytest.mark.guarantee(
    "User code", "A collective call in a function for `step.on_first` is refused there, and costs no replica."
)
@pytest.mark.parametrize("background", [False, True])
def test_collective_calls_in_a_function_for_on_first_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], background: bool
) -> None:
    """Only one replica runs the function: collective calls in it would wait for calls of the others that never come.
    Afterwards all replicas may make these calls again."""
    step, model = make()
    train(step, model, ITEMS, 1)
    calls: dict[str, Callable[[], Any]] = {
        "recover.save": lambda: recover.save(step, tmp_path),
        "recover.resume": lambda: recover.resume(step, tmp_path),
        "step.on_first": lambda: step.on_first(print),
    }
    for name, call in calls.items():
        step.on_first(call, background=background)
        step._engine.on_first.finish()
        said = capsys.readouterr().out
        assert f"{name} was called in" in said
        assert f"all replicas must call {name}" in said
        assert "training goes on" in said
    assert not list(tmp_path.iterdir())
    recover.save(step, tmp_path)
    assert (tmp_path / "checkpoints" / "step-1").is_dir()


def test_scheduler_that_step_was_given_is_saved_and_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done))
    step = recover.Step(World(), model, optimizer, BATCH, extra={"scheduler": scheduler})  # type: ignore[arg-type]
    train(step, model, ITEMS, 1)
    recover.save(step, tmp_path)
    assert "lack" not in capsys.readouterr().out


def test_batch_smaller_than_the_number_of_replicas_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    world = World()
    world.grid = Grid(BATCH, 1)
    make(world)
    assert "compute nothing" not in capsys.readouterr().out
    world.grid = Grid(BATCH + 2, 1)
    make(world)
    assert (
        f"global_batch={BATCH} is less than the {BATCH + 2} replicas, so 2 of them" in capsys.readouterr().out
    )


@pytest.mark.parametrize("is_called", [False, True])
def test_backward_of_a_plain_loop_is_named(is_called: bool) -> None:
    step, model = make()
    loop = step.microbatches(ITEMS)
    loss = model(next(loop)).square().mean()
    if is_called:
        loss.backward()
    with pytest.raises(RuntimeError, match=r"not followed by step\.backward\(loss\)") as raised:
        next(loop)
    assert ("instead of loss.backward(), which was called" in str(raised.value)) == is_called
