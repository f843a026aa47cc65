"""Gradient hooks: sums are the same in whatever order gradients become ready."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recover.gradients import deferred
from recover.gradients.module_gradients import OwnedGradients
from recover.gradients.reduction import make_sum


@pytest.mark.guarantee(
    "Work kept after a death",
    "One gradient hook announces a device bucket with `reduction=fast`; rounds and exact sums use the hook "
    "of each parameter.",
)
@given(
    st.lists(
        st.permutations(range(6)).flatmap(lambda p: st.integers(0, 6).map(lambda n: p[:n])),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 6),
    st.sampled_from(["fast", "reproducible"]),
)
@example([[4, 5, 3, 2, 0, 1]], 2, "fast")  # the parameter whose hook reports its bucket comes first
@example([[5, 3, 2, 1, 0], [5, 4, 3, 2, 1, 0]], 2, "fast")  # or it gets no gradient
@settings(max_examples=80, deadline=None)
def test_grad_hook_of_one_parameter_announces_a_device_bucket(
    microbatches: list[list[int]], in_a_bucket: int, reduction: str
) -> None:
    """Each parameter gets at most one gradient in a microbatch, as in a backward pass, and in the first microbatch
    they come in their usual order: the sums equal those with a hook for each parameter."""
    seen: dict[bool, list[torch.Tensor]] = {}
    for in_round in (False, True):
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(6)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(deferred, "NEAR", ())
            gradients = OwnedGradients(parameters, 3 * 4 * in_a_bucket / (1 << 20), make_sum(reduction, 64))
        gradients.begin()
        posted: list[torch.Tensor] = []
        for number, arrivals in enumerate([[5, 4, 3, 2, 1, 0], *microbatches]):
            last = number == len(microbatches)
            post = (lambda i, bucket, kept=posted: kept.append(bucket.local.clone())) if last else None
            gradients.expect(post, in_round=in_round)
            assert not gradients.have_arrived
            for at, which in enumerate(arrivals):
                (parameters[which] * torch.tensor([0.1, -0.7, 3.3]) / (1 + at + number)).sum().backward()
                assert gradients.have_arrived
            gradients.collect()
            assert all(parameter.grad is None for parameter in parameters)
        seen[in_round] = [*posted, torch.tensor(gradients.usage)]
        assert len(posted) == len(gradients.buckets)
    assert all(map(torch.equal, seen[False], seen[True]))


def hooks_of(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in parameters)


@pytest.mark.guarantee(
    "Work kept after a death",
    "One gradient hook announces a device bucket with `reduction=fast`; rounds and exact sums use the hook "
    "of each parameter.",
)
def test_grad_hook_of_a_device_bucket_moves_to_the_last_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full buckets are posted at once from the first microbatch on; after a different order each parameter of the
    bucket has its own hook again."""
    monkeypatch.setattr(deferred, "NEAR", ())
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(6)]
    gradients = OwnedGradients(parameters, 3 * 4 * 2 / (1 << 20))
    gradients.begin()
    usual, other = [4, 5, 2, 3, 1, 0], [5, 4, 2, 3, 1, 0]
    for order, tell, posted_after in (
        (usual, 6, [[], [0], [0], [0, 1], [0, 1], [0, 1, 2]]),
        (usual, 3, [[], [0], [0], [0, 1], [0, 1], [0, 1, 2]]),
        (other, 3, [[], [], [], [], [], []]),  # 4 comes after 5, whose hook reports both: no hook reports 4
        (other, 4, [[], [0], [0], [0, 1], [0, 1], [0, 1, 2]]),
    ):
        posted: list[int] = []
        gradients.expect(lambda index, bucket, posted=posted: posted.append(index))
        assert hooks_of(parameters) == tell
        for which, by_then in zip(order, posted_after, strict=True):
            (parameters[which] * 2.0).sum().backward()
            assert posted == by_then
        gradients.collect()
        assert posted == [0, 1, 2]
    gradients.expect(None, in_round=True)
    assert hooks_of(parameters) == 6, "in a round each tells"
    gradients.expect(None)
    assert hooks_of(parameters) == 4


@pytest.mark.guarantee(
    "Work kept after a death",
    "One gradient hook announces a device bucket with `reduction=fast`; rounds and exact sums use the hook "
    "of each parameter.",
)
@pytest.mark.parametrize("first", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_reproducible_sum_does_not_depend_on_earlier_hook_order(
    monkeypatch: pytest.MonkeyPatch, first: list[int]
) -> None:
    """In some microbatches a parameter gets two gradients, as with activation checkpointing: each is rounded by
    itself."""
    monkeypatch.setattr(deferred, "NEAR", ())
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]
    gradients = OwnedGradients(parameters, 3 * 4 * 2 / (1 << 20), make_sum("reproducible", 1 << 20))
    microbatches = [[3, 2, 1, 0], [3, 3, 2, 1, 1, 0], [3, 2, 2, 1, 0]]
    gradients.begin()
    for number in first:
        gradients.expect(None)
        assert hooks_of(parameters) == 4
        for at, which in enumerate(microbatches[number]):
            (parameters[which] * (0.1 + at + number)).mul(1e-9).sum().backward()
        gradients.collect()
    expected = torch.zeros(4, 3, dtype=torch.float64)
    for number, arrivals in enumerate(microbatches):
        for at, which in enumerate(arrivals):
            one = (torch.ones(3) * 1e-9) * (0.1 + at + number)
            (unit,) = gradients.sum.units([1 + which])
            expected[3 - which] += (one / unit).round().double()
    assert torch.equal(torch.cat([bucket.local for bucket in gradients.buckets]), expected.flatten())


def test_unannounced_second_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second gradient comes after its bucket was posted, for a parameter without a hook."""
    monkeypatch.setattr(deferred, "NEAR", ())
    first, last = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    gradients = OwnedGradients([last, first], bucket_mb=1)
    gradients.begin()
    for _ in range(2):
        gradients.expect(lambda index, bucket: None)
        for parameter in (first, last):
            parameter.sum().backward()
        if hooks_of([first, last]) == 2:
            gradients.collect()
    first.sum().backward()
    with pytest.raises(RuntimeError, match="second gradient"):
        gradients.collect()
