"""Sums that do not depend on order or grouping, and what cannot be summed so."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recover.sums.extremes import Extremes
from recover.sums.reduction import ReproducibleSum, make_sum


def fits(sum_: ReproducibleSum, place: torch.Tensor, gradient: torch.Tensor, first: bool = True) -> bool:
    """Add it; whether it was in range."""
    extremes = Extremes(sum_.bound)
    extremes.note(sum_.add([place], [gradient], first), 1)
    return extremes.within.value


@given(st.integers(1, 64), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_sums_do_not_depend_on_order_or_grouping(slots: int, seed: int) -> None:
    sum_ = ReproducibleSum(slots)
    gradients = [
        torch.randn(17, generator=torch.Generator().manual_seed(seed + slot)) * 10.0 ** (slot % 7 - 6)
        for slot in range(slots)
    ]

    def total(order: list[int], replicas: int) -> torch.Tensor:
        parts = []
        for replica in range(replicas):
            place, first = torch.zeros(17, dtype=torch.float64), True
            for slot in order[replica::replicas]:
                assert fits(sum_, place, gradients[slot].clone(), first)
                first = False
            parts.append(place)
        random.Random(seed).shuffle(parts)
        return sum_.mean(torch.stack(parts).sum(0), float(slots), 1.0)

    order = list(range(slots))
    reference = total(order, 1)
    random.Random(seed).shuffle(order)
    for replicas in (1, 2, 3, 5):
        assert torch.equal(total(order, replicas), reference)
    exact = torch.stack(gradients).double().sum(0) / slots
    torch.testing.assert_close(reference.double(), exact, rtol=1e-6, atol=sum_.unit)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_cannot_be_summed_exactly_is_told(value: float) -> None:
    sum_ = ReproducibleSum(16)
    place = torch.zeros(2, dtype=torch.float64)
    assert not fits(sum_, place, torch.tensor([1.0, value]))
    assert not fits(sum_, place, torch.tensor([0.0, sum_.bound]))
    assert fits(sum_, place, torch.tensor([0.0, sum_.bound * 0.99]))
    assert not sum_.covers(sum_.loss(value))


@pytest.mark.parametrize("batch", [1, 3, 7, 16, 100])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_bound_is_kept_to_the_last_bit(batch: int, sign: int) -> None:
    """It is a float64, and gradients are float32: rounded like them, it would let one more in, or one less."""
    sum_, place = ReproducibleSum(batch), torch.zeros(1, dtype=torch.float64)
    value = torch.tensor([sum_.bound], dtype=torch.float32)
    for _ in range(3):
        value = torch.nextafter(value, torch.zeros(1))
    for _ in range(6):
        assert fits(sum_, place, sign * value) is (float(value) < sum_.bound)
        value = torch.nextafter(value, torch.full((1,), math.inf))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e9])
def test_one_gradient_out_of_range_is_told_whatever_comes_after_it(value: float) -> None:
    sum_, place = ReproducibleSum(4), torch.zeros(2, dtype=torch.float64)
    for struck in range(6):
        extremes = Extremes(sum_.bound)
        for microbatch in range(3):
            for parameter in range(2):
                odd = 2 * microbatch + parameter == struck
                extremes.note(sum_.add([place], [torch.tensor([0.5, value if odd else -0.5])], False), 1)
            extremes.fold()
        assert not extremes.within.value
        extremes.clear()
        assert extremes.within.value


def test_the_losses_of_a_large_batch_and_a_large_vocabulary_can_be_summed() -> None:
    sum_ = ReproducibleSum(8192)
    assert sum_.covers(sum_.loss(11.0))
    assert abs(sum_.loss(11.3) * sum_.loss_unit - 11.3) < 1e-6


def test_an_unknown_reduction_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="'fast' or 'reproducible'"):
        make_sum("exact", 4)
