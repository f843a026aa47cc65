"""Reproducible sums: they do not depend on order or grouping, and their exponents follow from what was committed."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recover.gradients.exponents import (
    BUFFERS,
    GRADIENTS,
    HEADROOM,
    LOSSES,
    LOWEST,
    NOT_FINITE,
    RERUNS,
    START,
    WINDOW,
    ZERO,
    Exponents,
    code_of,
)
from recover.gradients.extremes import Extremes
from recover.gradients.reduction import ReproducibleSum, make_sum

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def code_of_gradient(
    sum_: ReproducibleSum, place: torch.Tensor, gradient: torch.Tensor, first: bool = True
) -> int:
    """Add it; the code of its largest magnitude."""
    extremes = Extremes()
    extremes.note(sum_.add([place], [gradient], first), 1)
    return code_of([extremes.largest.value])


def summed(sum_: ReproducibleSum, gradients: list[torch.Tensor], replicas: int, seed: int) -> torch.Tensor:
    """The mean over microbatches that are spread over replicas and added in some order."""
    parts, order = [], random.Random(seed).sample(range(len(gradients)), len(gradients))
    for replica in range(replicas):
        place, first = torch.zeros_like(gradients[0], dtype=torch.float64), True
        for slot in order[replica::replicas]:
            sum_.add([place], [gradients[slot].clone()], first)
            first = False
        parts.append(place)
    random.Random(seed).shuffle(parts)
    return sum_.mean(torch.stack(parts).sum(0), float(len(gradients)), 1.0)


@pytest.mark.guarantee("The trajectory", "Reproducible sums do not depend on order or grouping.")
@given(st.integers(1, 64), st.integers(0, 2**32 - 1), st.integers(-30, 30))
@settings(max_examples=60, deadline=None)
def test_sums_do_not_depend_on_order_or_grouping(slots: int, seed: int, size: int) -> None:
    """Of gradients of any size, once the exponents are those that the maxima require."""
    sum_ = ReproducibleSum(slots)
    gradients = [
        torch.randn(17, generator=torch.Generator().manual_seed(seed + slot)) * 10.0 ** (slot % 7 - 6 + size)
        for slot in range(slots)
    ]
    maxima = [code_of(torch.stack(gradients).flatten().tolist()), ZERO]
    if not sum_.exponents.fit(maxima):
        sum_.exponents.rerun(maxima)
    reference = summed(sum_, gradients, 1, 0)
    for replicas in (1, 2, 3, 5):
        assert torch.equal(summed(sum_, gradients, replicas, seed), reference)
    exact = torch.stack(gradients).double().sum(0) / slots
    torch.testing.assert_close(reference.double(), exact, rtol=1e-6, atol=sum_.unit)


@pytest.mark.guarantee(
    "The trajectory",
    "A finite gradient or loss never ends a run, overflows keep the bits through the death of their owner, "
    "and a NaN skips the step.",
)
@given(st.lists(FINITE, min_size=1, max_size=40), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_finite_gradient_needs_at_most_one_rerun(values: list[float], seed: int) -> None:
    sum_ = ReproducibleSum(len(values))
    gradients = [torch.tensor([value], dtype=torch.float32) for value in values]
    place, maxima = torch.zeros(1, dtype=torch.float64), [ZERO, ZERO]
    for gradient in gradients:
        maxima[GRADIENTS] = max(maxima[GRADIENTS], code_of_gradient(sum_, place, gradient))
    assert NOT_FINITE not in maxima
    if not sum_.exponents.fit(maxima):
        sum_.exponents.rerun(maxima)
    assert sum_.exponents.fit(maxima)
    reference = summed(sum_, gradients, 1, 0)
    assert all(torch.equal(summed(sum_, gradients, replicas, seed), reference) for replicas in (2, 3))
    exact = math.fsum(float(g) for g in gradients) / len(gradients)
    assert abs(float(reference) - exact) <= sum_.unit + 1e-6 * abs(exact)


@pytest.mark.guarantee(
    "The trajectory",
    "A finite gradient or loss never ends a run, overflows keep the bits through the death of their owner, "
    "and a NaN skips the step.",
)
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300), min_size=1)
)
def test_finite_loss_needs_at_most_one_rerun(losses: list[float]) -> None:
    sum_ = ReproducibleSum(len(losses))
    maxima = [ZERO, code_of(losses)]
    if not sum_.exponents.fit(maxima):
        sum_.exponents.rerun(maxima)
    forwards, backwards = (sum(map(sum_.loss, order)) for order in (losses, losses[::-1]))
    assert forwards == backwards
    assert abs(forwards - math.fsum(losses)) <= len(losses) * sum_.exponents.grid(LOSSES)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_have_their_own_code(value: float) -> None:
    place = torch.zeros(2, dtype=torch.float64)
    assert code_of_gradient(ReproducibleSum(16), place, torch.tensor([1.0, value])) == NOT_FINITE
    assert code_of([1.0, value, 2.0]) == NOT_FINITE


@pytest.mark.guarantee(
    "The trajectory",
    "The vote finds an overflow wherever it arose, and the repeated step keeps nothing of the first attempt.",
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e9])
def test_largest_gradient_is_known_whatever_follows_it(value: float) -> None:
    sum_, place = ReproducibleSum(4), torch.zeros(2, dtype=torch.float64)
    for struck in range(6):
        extremes = Extremes()
        for microbatch in range(3):
            for parameter in range(2):
                odd = 2 * microbatch + parameter == struck
                extremes.note(sum_.add([place], [torch.tensor([0.5, value if odd else -0.5])], False), 1)
            extremes.fold()
        assert extremes.largest.value == (1e9 if value == 1e9 else math.inf)
        extremes.clear()
        assert extremes.largest.value == 0.0


@given(st.floats(min_value=5e-324, max_value=1e308))
def test_exponent_code_is_the_least_exponent_above_a_magnitude(value: float) -> None:
    code = code_of([-value, value / 2, 0.0])
    assert math.ldexp(0.5, code) <= value < math.ldexp(1.0, code) if code < 1024 else value >= 2.0**1023


@pytest.mark.parametrize("batch", [1, 3, 7, 16, 100, 8192])
def test_values_below_the_exponent_sum_exactly_and_the_next_overflows(batch: int) -> None:
    sum_ = ReproducibleSum(batch)
    limit = 2.0 ** START[GRADIENTS]
    below = float(torch.nextafter(torch.tensor(limit), torch.tensor(0.0)))
    assert sum_.exponents.fit([code_of([below]), ZERO])
    assert not sum_.exponents.fit([code_of([limit]), ZERO])
    total = torch.zeros(1, dtype=torch.float64)
    for slot in range(batch):
        sum_.add([total], [torch.tensor([below])], first=slot == 0)
    assert float(total) * sum_.unit == batch * below  # exact: as many bits are left as B needs
    assert float(total) <= 2.0**53


@given(st.lists(st.tuples(st.integers(-140, 128), st.integers(-40, 60)), max_size=WINDOW + 20))
def test_exponents_follow_the_largest_maximum_of_recent_steps(steps: list[tuple[int, int]]) -> None:
    exponents, resumed = Exponents(8), Exponents(8)
    for number, maxima in enumerate(steps, start=1):
        exponents.begin(number)
        if not exponents.fit(maxima):
            exponents.rerun(maxima)
        assert exponents.fit(maxima)
        exponents.commit(maxima)
    resumed.load_state_dict(exponents.state_dict())
    for each in (exponents, resumed):
        each.begin(len(steps) + 1)
        for kind in (GRADIENTS, LOSSES):
            window = [maxima[kind] for maxima in steps[-WINDOW:]]
            expected = max(LOWEST, max(window) + HEADROOM) if window else START[kind]
            assert each.current[kind] == expected
    assert resumed.state_dict() == exponents.state_dict()


def test_exponents_reset_only_while_all_values_were_zero() -> None:
    exponents = Exponents(8)
    exponents.commit([ZERO, 3])
    exponents.begin(2)
    assert exponents.current == (START[GRADIENTS], 3 + HEADROOM)


def test_rerun_changes_only_the_exponents_that_were_too_small() -> None:
    exponents = Exponents(8)
    exponents.add_buffers(2)
    exponents.begin(1)
    maxima = [START[GRADIENTS] + 1, START[LOSSES], START[BUFFERS] + 3, -20]
    exponents.rerun(maxima)
    assert exponents.current == (maxima[0] + HEADROOM, START[LOSSES], maxima[2] + HEADROOM, START[BUFFERS])
    assert exponents.fit(maxima)


def test_attempt_with_larger_exponents_than_required_is_rejected() -> None:
    """A replica that died had the largest value, and the rerun is without it: the calm run would not have rerun."""
    exponents = Exponents(8)
    exponents.begin(1)
    exponents.rerun([40, 0])
    assert exponents.fit([40, 0])
    assert not exponents.fit([2, 0])
    exponents.rerun([2, 0])
    assert exponents.current == (START[GRADIENTS], START[LOSSES])


def test_maxima_that_differ_in_every_rerun_do_not_end_a_run() -> None:
    """As with kernels that are not deterministic: no overflow is committed, and reruns come to an end."""
    exponents = Exponents(8)
    exponents.begin(1)
    for rerun in range(RERUNS):
        assert not exponents.fit([20 + rerun % 2, 0])
        exponents.rerun([20 + rerun % 2, 0])
    assert exponents.fit([20, 0])
    assert exponents.fit([25, 0])
    assert not exponents.fit([90, 0])


def test_frequent_reruns_are_reported_once_in_a_hundred_steps() -> None:
    exponents, said = Exponents(8), []
    for number in range(1, 151):
        exponents.begin(number)
        if number % 5 == 0:
            exponents.rerun([number + 100, 0])
        exponents.commit([0, 0])
        said += [exponents.take_warning()]
    assert sum(map(bool, said)) == 2
    assert "11 reruns in the last 55 steps" in said[54]


def test_step_left_and_begun_again_keeps_its_exponents() -> None:
    exponents = Exponents(8)
    exponents.begin(3)
    exponents.rerun([40, 0])
    agreed = exponents.current
    exponents.begin(3)
    assert exponents.current == agreed
    exponents.begin(4)
    assert exponents.current != agreed


def test_exponents_of_another_model_are_refused() -> None:
    saved = Exponents(8)
    saved.commit([1, 2])
    other = Exponents(8)
    other.add_buffers(3)
    with pytest.raises(ValueError, match="has 2 exponents, and this model needs 5"):
        other.load_state_dict(saved.state_dict())


def test_unknown_reduction_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="'fast' or 'reproducible'"):
        make_sum("exact", 4)
