"""Steps that are skipped because the gradient is not finite: they are reported once, counted, and end a run that takes
no other steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_world import World
from torch import nn

import recover
from recover.runs.live.prometheus import exposition
from recover.runs.live.terminal import once
from recover.runs.live.view import RunView
from recover.step.errors import SkippedStepsError

BATCH = 4
INPUTS = [torch.randn(3, 2, generator=torch.Generator().manual_seed(index)) for index in range(60)]


def begin(**options: Any) -> tuple[recover.Step, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return recover.Step(World(), model, optimizer, BATCH, **options), model  # type: ignore[arg-type]


def take(
    step: recover.Step, model: nn.Module, loss_of: Callable[[torch.Tensor, int], Any] | None = None
) -> None:
    """Take one step; `loss_of` may spoil the loss of a sample."""
    for inputs in step.microbatches(list(enumerate(INPUTS))):
        number, rows = inputs
        loss = model(rows).square().mean()
        step.backward(loss if loss_of is None else loss_of(loss, number))


def nan_at(*samples: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    return lambda loss, number: loss * float("nan") if number in samples else loss


class Overflow(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * float("inf")


def overflow(loss: torch.Tensor, _: int) -> torch.Tensor:
    """A finite loss with an infinite gradient."""
    found: torch.Tensor = Overflow.apply(loss)
    return found


@pytest.mark.guarantee(
    "Faults, hangs and stragglers",
    "The first skipped step is reported with its number, the reason and its samples; `skip_limit` skipped steps in "
    "a row end the run on all replicas in the same step.",
)
@pytest.mark.parametrize("reduction", ["fast", "reproducible"])
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (nan_at(5), "step 2 was skipped: the loss of sample 5 is not finite; parameters"),
        (nan_at(4, 6, 7), "step 2 was skipped: the loss of samples 4, 6, 7 is not finite; parameters"),
        (overflow, r"and its gradient is not finite (samples 4, 5, 6, 7); parameters"),
    ],
)
def test_first_skipped_step_is_reported_with_reason_and_samples(
    spoil: Any, told: str, reduction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step, model = begin(reduction=reduction)
    take(step, model)
    assert "skipped" not in capsys.readouterr().out
    before = model.weight.detach().clone()
    take(step, model, spoil)
    said = capsys.readouterr().out
    assert told in said
    assert "50 in a row end the run (skip_limit)" in said
    assert (step.skipped, torch.equal(model.weight, before)) == (1, True)
    assert step.all_samples == [4, 5, 6, 7], "a sample with a loss that is not finite counts as well"
    take(step, model, nan_at(8))
    assert capsys.readouterr().out == "", "the first one is reported, later ones are counted"
    assert step.skipped == 2


@pytest.mark.guarantee(
    "Faults, hangs and stragglers",
    "The first skipped step is reported with its number, the reason and its samples; `skip_limit` skipped steps in "
    "a row end the run on all replicas in the same step.",
)
def test_skipped_steps_in_a_row_end_the_run_and_name_the_first() -> None:
    step, model = begin(skip_limit=3)
    for spoiled in ((), (5,), (9,), (), (17,), (21,)):  # two skipped in a row, twice
        take(step, model, nan_at(*spoiled))
    with pytest.raises(SkippedStepsError) as error:
        take(step, model, nan_at(25))
    told = str(error.value)
    assert "3 steps in a row were skipped, the last is step 7 (skip_limit=3)" in told
    assert "step 5 was skipped: the loss of sample 17 is not finite" in told
    assert "resume from a checkpoint before that step; skip_limit=0" in told
    assert (step.index, step.skipped) == (7, 5), "the last one is committed"


@pytest.mark.parametrize("limit", [0, None])
def test_run_without_a_skip_limit_goes_on(limit: int | None) -> None:
    step, model = begin(skip_limit=limit)
    while step.index < 12:
        take(step, model, nan_at(*range(60)))
    assert step.skipped == 12


@pytest.mark.parametrize("limit", [-1, 2.5, True, "3"])
def test_skip_limit_that_is_no_number_of_steps_is_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"skip_limit is .*; give a whole number of steps, or 0"):
        begin(skip_limit=limit)


def test_joining_replica_receives_the_count_of_skipped_steps() -> None:
    """Otherwise the joining replica would go on where the others end."""
    there, here = begin(skip_limit=3), begin(skip_limit=3)
    for _ in range(2):
        take(*there, nan_at(*range(60)))
    handed = there[0]._engine.handover._state[3]["recover.skipped"]
    here[0]._engine.handover._state[3]["recover.skipped"].load_state_dict(handed.state_dict())  # type: ignore[union-attr]
    with pytest.raises(
        SkippedStepsError, match="The first: step 1 was skipped: the loss of samples 0, 1, 2, 3"
    ):
        take(*here, nan_at(*range(60)))


def test_resumed_run_counts_from_the_checkpoint_on(tmp_path: Path) -> None:
    """A user who resumes has usually changed something, so the full number of steps may be skipped again."""
    step, model = begin(skip_limit=2)
    take(step, model, nan_at(0))
    recover.save(step, tmp_path)
    step, model = begin(skip_limit=2)
    recover.resume(step, tmp_path)
    take(step, model, nan_at(4))
    assert step.skipped == 2


@pytest.mark.guarantee(
    "Monitoring", "Skipped steps are counted in `recover status`, on the page and in the Prometheus metrics."
)
def test_skipped_steps_are_counted_in_status_and_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {
            "step": number,
            "loss": 1.0,
            "microbatches": 4,
            "replicas": 1,
            "seconds": 1.0,
            "at": float(number),
            **({"skipped": True} if number in (2, 3) else {}),
        }
        for number in range(1, 5)
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    view = RunView(tmp_path)
    view.refresh()
    assert view.state()["skipped"] == 2
    assert "recover_steps_skipped_total" in (text := exposition(view).decode())
    assert f'recover_steps_skipped_total{{run="{view.name}"}} 2.0' in text
    once(view)
    assert "skipped 2 steps: the gradient was not finite" in " ".join(capsys.readouterr().out.split())
