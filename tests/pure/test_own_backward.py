"""`step.own_backward`: trainers that run backward themselves, as often as they like for one microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lone_world import BATCH, World, begin

STEPS = 3
TOKENS = [5, 3, 8, 1]  # tokens of each slot


class Data:
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        tokens = TOKENS[index % BATCH]
        return torch.randn(tokens, 6, generator=torch.Generator().manual_seed(index)), tokens


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def losses_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().flatten()


def make_tied() -> torch.nn.Module:
    model = make_model()
    shared = torch.nn.Linear(5, 5)
    return torch.nn.Sequential(model[0], shared, model[1], shared, model[2])  # type: ignore[index]


def parameters_after(
    own: bool, early: bool = False, tied: bool = False, **options: Any
) -> tuple[list[torch.Tensor], list[float]]:
    """Parameters and losses after some steps. `own`: backward runs through the head row by row, then through the rest,
    as with a chunked loss.

    `early`: the loss is recorded before the last pass. `tied`: the head shares a weight with the rest.
    """
    model = make_tied() if tied else make_model()
    at = 3 if tied else 2
    step, losses = begin(World(), model, clip=0.1, bucket_mb=1e-5, **options), []
    for _ in range(STEPS):
        for rows, tokens in step.microbatches(Data()):
            if not own:
                step.backward(losses_of(model, rows).mean(), weight=tokens)
                continue
            with step.own_backward(weight=tokens) as record:
                hidden = model[:at](rows)  # type: ignore[index]
                cut, total = hidden.detach().requires_grad_(), torch.zeros(())
                for chunk in cut:
                    loss = losses_of(model[at:], chunk).sum()  # type: ignore[index]
                    loss.backward()
                    total += loss.detach()
                if early:
                    record(total / tokens, before_last_pass=True)
                hidden.backward(cut.grad)
                if not early:
                    record(total / tokens)
        losses.append(step.loss)
    return [p.detach().clone() for p in model.parameters()], losses


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reduction", ["fast", "reproducible"])
def test_own_backward_in_several_pieces_equals_backward_of_the_step(reduction: str, tied: bool) -> None:
    expected, losses = parameters_after(own=False, tied=tied, reduction=reduction)
    found, own_losses = parameters_after(own=True, tied=tied, reduction=reduction)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert own_losses == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reduction", ["fast", "reproducible"])
def test_loss_recorded_before_the_last_pass_leads_to_the_same_bits(reduction: str, tied: bool) -> None:
    late = parameters_after(own=True, tied=tied, reduction=reduction)
    early = parameters_after(own=True, early=True, tied=tied, reduction=reduction)
    assert all(map(torch.equal, early[0], late[0]))
    assert early[1] == late[1]


@pytest.mark.parametrize("reduction", ["fast", "reproducible"])
def test_own_backward_ignores_gradients_that_its_caller_drops(reduction: str) -> None:
    """A pipeline of torch 2.15 probes its stages by a real backward pass, and sets `.grad` to None again."""

    def after(probes: bool) -> list[torch.Tensor]:
        model = make_model()
        step = begin(World(), model, reduction=reduction)
        for _ in range(STEPS):
            for rows, tokens in step.microbatches(Data()):
                with step.own_backward(weight=tokens) as record:
                    if probes:
                        losses_of(model, rows + 1).sum().backward()
                        model.zero_grad(set_to_none=True)
                    loss = losses_of(model, rows).sum()
                    loss.backward()
                    record(loss / tokens)
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, after(probes=True), after(probes=False)))


def test_own_backward_posts_no_bucket_before_it_ends() -> None:
    """A parameter may get another gradient: a bucket that was full already would be reduced without it."""
    model, world = make_model(), World()
    step = begin(world, model)
    world.log.clear()
    for number, (rows, _) in enumerate(step.microbatches(Data())):
        with step.own_backward() as record:
            for _ in range(2):
                losses_of(model, rows).sum().backward()
            assert "bucket" not in world.log
            record(losses_of(model, rows).mean())
        assert ("bucket" in world.log) is (number == BATCH - 1)


def test_buckets_are_posted_during_the_last_pass_if_the_loss_was_recorded_before_it() -> None:
    """This includes the bucket of a head whose gradient is complete before the last pass: from the second microbatch
    on this is known."""
    model, world = make_model(), World()
    step = begin(world, model, bucket_mb=1e-5)
    posted: list[int] = []
    for _ in range(2):
        world.log.clear()
        for rows, _ in step.microbatches(Data()):
            with step.own_backward() as record:
                hidden = model[:2](rows)  # type: ignore[index]
                cut = hidden.detach().requires_grad_()
                loss = losses_of(model[2:], cut).sum()  # type: ignore[index]
                loss.backward()
                assert "bucket" not in world.log
                record(loss, before_last_pass=True)
                hidden.register_hook(lambda _: posted.append(world.log.count("bucket")))
                hidden.backward(cut.grad)
                posted.append(world.log.count("bucket"))
    last = posted[2 * BATCH - 2 :: 2 * BATCH], posted[2 * BATCH - 1 :: 2 * BATCH]
    assert set(posted) - set(last[0]) - set(last[1]) <= {0}
    assert last == ([2, 2], [4, 4]), "the head's weight and bias before the pass, all four after it"


@pytest.mark.parametrize("losses", [0, 2])
def test_own_backward_without_one_recorded_loss_is_refused(losses: int) -> None:
    model = make_model()
    step = begin(World(), model)
    batches = step.microbatches(Data())
    rows, _ = next(batches)

    def compute() -> None:
        with step.own_backward() as record:
            losses_of(model, rows).mean().backward()
            for _ in range(losses):
                record(torch.zeros(()))

    with pytest.raises(RuntimeError, match=f"recorded {losses} losses"):
        compute()
    with pytest.warns(UserWarning, match="left before it was complete"):
        batches.close()  # type: ignore[attr-defined]


def test_own_backward_after_another_backward_is_refused() -> None:
    model = make_model()
    step = begin(World(), model)
    with pytest.raises(RuntimeError, match="0 microbatch"), step.own_backward():
        pass
    batches = step.microbatches(Data())
    rows, _ = next(batches)
    losses_of(model, rows).mean().backward()
    with pytest.raises(RuntimeError, match=r"gradients before step\.own_backward"), step.own_backward():
        pass
    with pytest.warns(UserWarning, match="left before it was complete"):
        batches.close()  # type: ignore[attr-defined]


def test_own_backward_inside_a_round_is_refused() -> None:
    step = begin(World(), make_model())
    rounds = step.rounds(Data())
    next(rounds)
    with pytest.raises(RuntimeError, match=r"in step\.rounds"), step.own_backward():
        pass
    with pytest.warns(UserWarning, match="left before it was complete"):
        rounds.close()  # type: ignore[attr-defined]


class Counting(torch.nn.Module):
    """A module that counts rows in forward, as an expert counts its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.rows += len(rows)  # type: ignore[has-type]
        return self.inner(rows)  # type: ignore[no-any-return]


def test_optimizer_hook_sees_buffer_changes_of_the_whole_step() -> None:
    """One such hook balances experts: the counts of the last microbatch alone would differ by replica."""
    model, seen = Counting(), []
    step = begin(World(), model, buffers=["rows"])

    def look(optimizer: Any, *_: Any) -> None:
        seen.append(float(model.rows))
        model.rows.zero_()

    step._optimizer.register_step_pre_hook(look)  # type: ignore[union-attr]
    for _ in range(STEPS):
        for rows, tokens in step.microbatches(Data()):
            with step.own_backward(tokens) as record:
                loss = losses_of(model, rows).sum()
                loss.backward()
                record(loss / tokens)
    assert seen == [sum(TOKENS) / BATCH] * STEPS
    assert float(model.rows) == 0
