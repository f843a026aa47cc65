"""Mistakes of users with Step: refused by name, with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_world import BATCH, World, begin
from toy import Model, Stream, loss_of, make_optimizer

import recover
from recover.step.loop.early_leaves import INSIDE, EarlyLeaves


@pytest.mark.guarantee(
    "User code",
    "Wrong arguments of a step, a second backward and collective calls inside the microbatch loop are "
    "refused by name and with the remedy.",
)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"world": None}, r"a NoneType, Model, .* recover.Step\(world, model, optimizer, global_batch=...\)"),
        ({"optimizer": Model()}, "a World, Model, Model; give it"),
        ({"global_batch": "8"}, "global_batch is '8'; give a whole number"),
        ({"global_batch": 8.0}, "global_batch is 8.0; give a whole number"),
        ({"global_batch": True}, "global_batch is True"),
        ({"global_batch": 0}, "global_batch is 0; it must be at least 1"),
        ({"clip": "1"}, "clip is '1'; it must be a positive number, or None"),
        ({"clip": 0}, "clip is 0; it must be a positive number, or None"),
        ({"bucket_mb": 0}, "bucket_mb is 0; it must be a positive number"),
        ({"extra": {"best": 3}}, r"extra\['best'\] is a int, .* state_dict\(\)"),
        (
            {"scheduler": torch.optim.lr_scheduler.StepLR},
            "scheduler is the class StepLR; give one that was made",
        ),
        ({"scheduler": 0.1}, "scheduler is float; give one"),
    ],
)
def test_step_arguments_of_the_wrong_type_are_refused_with_the_remedy(
    given: dict[str, Any], told: str
) -> None:
    model = Model()
    usual = {"world": World(), "model": model, "optimizer": make_optimizer(model), "global_batch": BATCH}
    with pytest.raises((TypeError, ValueError), match=told):
        recover.Step(**usual | given)


def test_swapped_arguments_are_named_as_they_were_given() -> None:
    model = Model()
    with pytest.raises(TypeError, match="Step was given a World, SGD, Model"):
        recover.Step(World(), make_optimizer(model), model, BATCH)  # type: ignore[arg-type]


@pytest.mark.guarantee(
    "User code",
    "Wrong arguments of a step, a second backward and collective calls inside the microbatch loop are "
    "refused by name and with the remedy.",
)
def test_losses_and_streams_of_the_wrong_type_are_refused_with_the_remedy() -> None:
    model = Model().eval()
    step = begin(World(), model)

    def take(stream: Any, backward: Callable[[Any], object]) -> None:
        for inputs, target, index in step.microbatches(stream):
            backward(loss_of(model, (inputs, target, index)))

    def twice(number: int) -> Callable[[torch.Tensor], None]:
        passed = count()

        def backward(loss: torch.Tensor) -> None:
            if next(passed) == number:
                loss.backward(retain_graph=True)
            step.backward(loss)

        return backward

    all_of_one = [Stream()[index] for index in range(BATCH)]
    take(all_of_one, step.backward)
    with pytest.raises(IndexError) as short:
        take(all_of_one, step.backward)
    assert (
        "asked for microbatch 4; it must have as many as the loop takes steps of B"
        in short.value.__notes__[0]
    )
    with (
        pytest.warns(UserWarning, match="left before"),
        pytest.raises(TypeError, match="the loss is a float; give"),
    ):
        take(Stream(), lambda loss: step.backward(loss.item()))
    for number in range(BATCH):  # in every microbatch, not only in the last
        with (
            pytest.warns(UserWarning, match="left before"),
            pytest.raises(
                RuntimeError, match=r"gradients before step.backward: .* leave loss.backward\(\) out"
            ),
        ):
            take(Stream(), twice(number))
    assert step.index == 1


@pytest.mark.guarantee(
    "User code",
    "Wrong arguments of a step, a second backward and collective calls inside the microbatch loop are "
    "refused by name and with the remedy.",
)
def test_collective_calls_are_refused_inside_the_microbatch_loop(tmp_path: Path) -> None:
    model = Model().eval()
    step, did = begin(World(), model), list[int]()
    for number, (inputs, target, index) in enumerate(step.microbatches(Stream())):
        for name, act in (("step.on_first", step.on_first), ("recover.save", recover.save)):
            arguments = (did.append, 1) if name == "step.on_first" else (step, tmp_path)
            with pytest.raises(
                RuntimeError, match=rf"{name} was called inside the loop .* call it after the loop"
            ):
                act(*arguments)
        step.backward(loss_of(model, (inputs, target, index)))
        with pytest.raises(RuntimeError, match="inside the loop"):
            step.on_first(did.append, number)
    assert (step.index, did) == (1, [])
    step.refuse_inside_step("anything")
    with pytest.warns(UserWarning, match="left before it was complete"):
        next(iter(step.microbatches(Stream())))
    step.refuse_inside_step("anything")


def test_heldout_loss_is_recorded_after_a_step_and_only_if_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recorded = Model().eval(), list[float]()
    step = begin(World(), model)
    monkeypatch.setattr(step._engine.records, "heldout", recorded.append)
    for microbatch in step.microbatches(Stream()):
        with pytest.raises(RuntimeError, match=r"step\.record_heldout_loss was called inside the loop"):
            step.record_heldout_loss(3.0)
        step.backward(loss_of(model, microbatch))
    step.record_heldout_loss(torch.tensor(2.5))  # type: ignore[arg-type]
    step.record_heldout_loss(float("nan"))
    assert recorded == [2.5]


def test_gradients_belong_to_the_user_after_a_break() -> None:
    model, world = Model().eval(), World()
    step = begin(world, model)

    def leave_the_last_microbatch() -> None:
        for number, sample in enumerate(step.microbatches(Stream())):
            if number == BATCH - 1:
                break
            step.backward(loss_of(model, sample))

    with pytest.warns(UserWarning, match="left before it was complete"):
        leave_the_last_microbatch()
    before = world.log.count("bucket")
    loss_of(model, Stream()[0]).backward()
    assert any(p.grad is not None for p in model.parameters()), "they were taken for a step that is left"
    assert world.log.count("bucket") == before, "a bucket of a step that is left was posted"


def leave_until_refused(step: recover.Step, backward: Callable[[Any], object]) -> int:
    """Run a loop with a `break` until it raises; the error begins with the number of times that it was left."""
    for leaves in range(100):
        microbatches = step.microbatches(Stream())
        try:
            sample = next(microbatches)
        except RuntimeError as error:
            raise RuntimeError(f"{leaves}: {error}") from None
        backward(sample)
        del microbatches
    return 0


@pytest.mark.guarantee(
    "User code",
    "A loop that leaves the same step again and again without getting further is ended with the remedy.",
)
@pytest.mark.filterwarnings("ignore:step 1 was left")
def test_break_repeated_without_progress_raises_with_the_remedy() -> None:
    model = Model().eval()
    step = begin(World(), model)
    with pytest.raises(
        RuntimeError, match=r"^2: step 1 was left .* 2 times in a row .*leave the `break` out"
    ) as ended:
        leave_until_refused(step, lambda sample: step.backward(loss_of(model, sample)))
    assert "after at most 1 microbatch(es)" in str(ended.value)
    assert "`while step.index < N` or step.request_stop()" in str(ended.value)


@pytest.mark.filterwarnings("ignore:step 1 was left")
def test_break_before_backward_repeated_without_progress_ends_as_well() -> None:
    """It ends after more tries, because in most such loops an exception was caught, and the microbatch is tried
    again."""
    step = begin(World(), Model().eval())
    with pytest.raises(RuntimeError, match=r"^8: step 1 was left before it was complete, 8 times in a row"):
        leave_until_refused(step, lambda sample: None)


@pytest.mark.filterwarnings("ignore:step .* was left")
def test_step_left_again_further_on_or_after_a_commit_may_be_taken() -> None:
    model = Model().eval()
    step = begin(World(), model)

    def take(microbatches: int) -> None:
        for number, sample in enumerate(step.microbatches(Stream()), start=1):
            step.backward(loss_of(model, sample))
            if number == microbatches:
                break

    for microbatches in (1, 2, 3, BATCH + 1, 1, BATCH + 1, 1, BATCH + 1):
        take(microbatches)
    assert step.index == 3


def test_caught_exceptions_do_not_count_as_breaks() -> None:
    leaves = EarlyLeaves()
    leaves.left(5, 2, True)
    leaves.left(5, 2, False)
    leaves.refuse_another(5)
    leaves.left(5, 2, False)
    with pytest.raises(RuntimeError, match="3 times in a row"):
        leaves.refuse_another(5)


def test_second_refusal_ends_a_loop_that_catches_exceptions() -> None:
    """Otherwise the loop would call step.microbatches for ever, while the others wait for its vote."""
    leaves = EarlyLeaves()
    for _ in range(INSIDE):
        leaves.left(5, 2, True)
    with pytest.raises(RuntimeError):
        leaves.refuse_another(5)
    with pytest.raises(SystemExit, match="8 times in a row"):
        leaves.refuse_another(5)
