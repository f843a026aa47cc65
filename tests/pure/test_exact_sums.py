"""Reproducible sums: they do not depend on order or grouping, and their exponents follow from the committed steps."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recover.gradients.exponents import (
    HEADROOM,
    LOSSES,
    LOWEST,
    NEAR,
    NOT_FINITE,
    PRECISION,
    RERUNS,
    START,
    WINDOW,
    ZERO,
    Exponents,
    code_of,
    codes_of,
)
from recover.gradients.extremes import Extremes
from recover.gradients.reduction import WORD, ReproducibleSum, make_sum

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
WORDS = st.sampled_from([64, 32])
ONE = 1  # the number of the first parameter's exponent


def sum_of(batch: int, bits: int = 64, parameters: int = 1) -> ReproducibleSum:
    sum_ = ReproducibleSum(batch, bits)
    sum_.exponents.name("parameters", [str(number) for number in range(parameters)])
    return sum_


def exponents_of(batch: int, bits: int = 64, parameters: int = 1) -> Exponents:
    return sum_of(batch, bits, parameters).exponents


def maxima_of(gradient: int, loss: int = ZERO) -> list[int]:
    return [loss, gradient]


def code_of_gradient(
    sum_: ReproducibleSum, place: torch.Tensor, gradient: torch.Tensor, first: bool = True
) -> int:
    """Add the gradient, and return the code of its largest magnitude."""
    extremes = Extremes()
    extremes.note(sum_.add([ONE], [place], [gradient], first))
    return int(codes_of(extremes.largest.value)[ONE])


def summed(sum_: ReproducibleSum, gradients: list[torch.Tensor], replicas: int, seed: int) -> torch.Tensor:
    """The mean over microbatches that are spread over replicas and added in some order."""
    parts, order = [], random.Random(seed).sample(range(len(gradients)), len(gradients))
    word = sum_.dtype_for(torch.float32)
    for replica in range(replicas):
        place, first = torch.zeros_like(gradients[0], dtype=word), True
        for slot in order[replica::replicas]:
            sum_.add([ONE], [place], [gradients[slot].clone()], first)
            first = False
        parts.append(place)
    random.Random(seed).shuffle(parts)
    total = torch.stack(parts).sum(0, dtype=word)
    return sum_.mean(total, [ONE], [total.numel()], float(len(gradients)), 1.0)


@pytest.mark.guarantee("The trajectory", "Reproducible sums do not depend on order or grouping.")
@given(st.integers(1, 64), st.integers(0, 2**32 - 1), st.integers(-30, 30), WORDS)
@settings(max_examples=60, deadline=None)
def test_sums_do_not_depend_on_order_or_grouping(slots: int, seed: int, size: int, bits: int) -> None:
    """This holds for gradients of any size, once the exponents are those that the maxima require."""
    sum_ = sum_of(slots, bits)
    gradients = [
        torch.randn(17, generator=torch.Generator().manual_seed(seed + slot)) * 10.0 ** (slot % 7 - 6 + size)
        for slot in range(slots)
    ]
    maxima = maxima_of(code_of(torch.stack(gradients).flatten().tolist()))
    if not sum_.exponents.fit(maxima):
        sum_.exponents.rerun(maxima)
    reference = summed(sum_, gradients, 1, 0)
    for replicas in (1, 2, 3, 5):
        assert torch.equal(summed(sum_, gradients, replicas, seed), reference)
    exact = torch.stack(gradients).double().sum(0) / slots
    torch.testing.assert_close(reference.double(), exact, rtol=1e-6, atol=sum_.units([ONE])[0])


@pytest.mark.guarantee(
    "The trajectory",
    "A finite gradient or loss never ends a run, overflows keep the bits through the death of their owner, "
    "and a NaN skips the step.",
)
@given(st.lists(FINITE, min_size=1, max_size=40), st.integers(0, 2**32 - 1), WORDS)
@settings(max_examples=100, deadline=None)
def test_finite_gradient_needs_at_most_one_rerun(values: list[float], seed: int, bits: int) -> None:
    sum_ = sum_of(len(values), bits)
    gradients = [torch.tensor([value], dtype=torch.float32) for value in values]
    place, largest = torch.zeros(1, dtype=WORD[bits]), ZERO
    for gradient in gradients:
        largest = max(largest, code_of_gradient(sum_, place, gradient))
    maxima = maxima_of(largest)
    assert NOT_FINITE not in maxima
    if not sum_.exponents.fit(maxima):
        sum_.exponents.rerun(maxima)
    assert sum_.exponents.fit(maxima)
    reference = summed(sum_, gradients, 1, 0)
    assert all(torch.equal(summed(sum_, gradients, replicas, seed), reference) for replicas in (2, 3))
    exact = math.fsum(float(g) for g in gradients) / len(gradients)
    assert abs(float(reference) - exact) <= sum_.units([ONE])[0] + 1e-6 * abs(exact)


@pytest.mark.guarantee(
    "The trajectory",
    "The error of a reproducible mean is at most 2^-22 of the parameter's largest recent gradient, whatever other "
    "parameters have.",
)
@given(
    st.integers(0, 8),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(-50, 60), min_size=1, max_size=6),
    WORDS,
)
@settings(max_examples=80, deadline=None)
def test_error_of_a_mean_is_bounded_by_its_parameters_largest_gradient(
    log_of_batch: int, seed: int, sizes: list[int], bits: int
) -> None:
    """The bound holds from the first step on, for gradients of any sizes side by side in one bucket; the rounding of
    float32 is added."""
    batch = (1 << log_of_batch) - seed % (1 << log_of_batch) // 2  # also batches that are no power of two
    sum_, generator = sum_of(batch, bits, len(sizes)), torch.Generator().manual_seed(seed)
    kinds, length = list(range(1, 1 + len(sizes))), 9
    gradients = [
        [torch.randn(length, generator=generator) * 2.0**size for size in sizes] for _ in range(batch)
    ]
    if seed % 2:  # all gradients are equal: their rounding errors add up
        gradients = [gradients[0]] * batch
    largest = [max(float(each[at].abs().max()) for each in gradients) for at in range(len(sizes))]
    maxima = [ZERO, *codes_of(largest)]
    if not sum_.exponents.fit(maxima):
        sum_.exponents.rerun(maxima)
    assert sum_.exponents.fit(maxima)
    bucket = torch.zeros(length * len(sizes), dtype=sum_.dtype_for(torch.float32))
    for number, each in enumerate(gradients):
        sum_.add(kinds, list(bucket.split(length)), each, first=number == 0)
    mean = sum_.mean(bucket, kinds, [length] * len(sizes), float(batch), 1.0).double()
    exact = torch.stack([torch.cat(each) for each in gradients]).double().mean(0)
    for error, value, limit in zip(
        (mean - exact).abs().split(length), exact.split(length), largest, strict=True
    ):
        # Three roundings to float32 at most: of the sum, of the factor, of the mean.
        allowed = limit * 2.0**-PRECISION * (1 + 2 * NEAR) + value.abs() * 3 * 2.0**-24
        assert bool((error <= allowed).all()), (error / allowed).max()


@pytest.mark.guarantee(
    "Grids (3D parallelism)",
    "Where P ranks of a replica add up parts of a gradient, the error of its reproducible mean is at most P x 2^-22 of "
    "P times the largest part.",
)
@given(
    st.integers(0, 8), st.sampled_from([1, 2, 3, 8]), st.integers(0, 2**32 - 1), st.integers(-30, 30), WORDS
)
@settings(max_examples=60, deadline=None)
def test_error_of_gradients_in_parts_is_bounded_by_their_number(
    log_of_batch: int, parts: int, seed: int, size: int, bits: int
) -> None:
    batch, generator = 1 << log_of_batch, torch.Generator().manual_seed(seed)
    sum_ = sum_of(batch, bits)
    gradients = [torch.randn(9, generator=generator) * 2.0**size for _ in range(parts)]
    largest = parts * max(float(each.abs().max()) for each in gradients)  # as in `OwnedGradients.largest`
    sum_.exponents.rerun(maxima_of(code_of([largest])))
    total = torch.zeros(9, dtype=WORD[bits])
    for _ in range(batch):  # all gradients are equal: their rounding errors add up
        for gradient in gradients:
            sum_.add([ONE], [total], [gradient], first=False)
    mean, exact = (
        sum_.mean(total, [ONE], [9], float(batch), 1.0).double(),
        sum(each.double() for each in gradients),
    )
    allowed = largest * parts * 2.0**-PRECISION * (1 + 2 * NEAR) + abs(exact) * 3 * 2.0**-24  # type: ignore[arg-type]
    assert bool(((mean - exact).abs() <= allowed).all())


@pytest.mark.guarantee(
    "The trajectory",
    "A finite gradient or loss never ends a run, overflows keep the bits through the death of their owner, "
    "and a NaN skips the step.",
)
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300), min_size=1)
)
def test_finite_loss_needs_at_most_one_rerun(losses: list[float]) -> None:
    sum_ = sum_of(len(losses))
    maxima = maxima_of(ZERO, code_of(losses))
    if not sum_.exponents.fit(maxima):
        sum_.exponents.rerun(maxima)
    forwards, backwards = (sum(map(sum_.loss, order)) for order in (losses, losses[::-1]))
    assert forwards == backwards
    assert abs(forwards - math.fsum(losses)) <= len(losses) * sum_.units([LOSSES])[0]


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_have_their_own_code(value: float, bits: int) -> None:
    place = torch.zeros(2, dtype=WORD[bits])
    assert code_of_gradient(sum_of(16, bits), place, torch.tensor([1.0, value])) == NOT_FINITE
    assert code_of([1.0, value, 2.0]) == NOT_FINITE


@pytest.mark.guarantee(
    "The trajectory",
    "The vote finds an overflow wherever it arose, and the repeated step keeps nothing of the first attempt.",
)
@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e9])
def test_largest_gradient_is_known_whatever_follows_it(value: float, bits: int) -> None:
    """It is noted for the parameter that had it, and for no other one."""
    sum_, place = sum_of(4, bits, 3), torch.zeros(2, dtype=WORD[bits])
    for struck in range(6):
        extremes = Extremes()
        for microbatch in range(3):
            for parameter in range(2):
                odd = 2 * microbatch + parameter == struck
                gradient = torch.tensor([0.5, value if odd else -0.5])
                extremes.note(sum_.add([1 + parameter], [place], [gradient], False))
            extremes.fold()
        expected = [0.0, 0.5, 0.5]
        expected[1 + struck % 2] = 1e9 if value == 1e9 else math.inf
        assert extremes.largest.value.tolist() == expected
        extremes.clear()
        assert not extremes.largest.value.any()


@given(st.floats(min_value=5e-324, max_value=1e308))
def test_exponent_code_is_the_least_exponent_above_a_magnitude(value: float) -> None:
    """The exception are values just below a power of two, which count as the power itself."""
    code = code_of([-value, value / 2, 0.0])
    near = math.frexp(value)[0] > 1 - NEAR
    assert code == math.frexp(value)[1] + near
    assert value < math.ldexp(1.0, code) if code < 1024 else value >= 2.0**1022


@pytest.mark.guarantee(
    "The trajectory", "No sum of B gradients that fit their exponent leaves a word of 64 or of 32 bits."
)
@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("batch", [1, 3, 7, 16, 100, 128, 256])
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_fitting_values_sum_without_overflow(batch: int, bits: int, sign: int) -> None:
    """B times the largest value that fits, rounded up: the sum has the right sign and size."""
    sum_ = sum_of(batch, bits)
    limit = 2.0 ** START["parameters"] * (1 - NEAR)
    below = float(torch.nextafter(torch.tensor(limit), torch.tensor(0.0)))
    above = float(torch.nextafter(torch.tensor(limit), torch.tensor(math.inf)))
    assert sum_.exponents.fit(maxima_of(code_of([below])))
    assert not sum_.exponents.fit(maxima_of(code_of([above])))
    total = torch.zeros(1, dtype=WORD[bits])
    for slot in range(batch):
        sum_.add([ONE], [total], [torch.tensor([sign * below])], first=slot == 0)
    (unit,) = sum_.units([ONE])
    assert abs(int(total) * unit - sign * batch * below) <= batch * unit / 2
    assert (int(total) > 0) == (sign > 0)


@pytest.mark.parametrize("batch", [1, 2, 16, 100, 256])
def test_words_of_32_bits_use_the_last_bit_that_is_safe(batch: int) -> None:
    """With one bit more per value, the largest values would leave the word."""
    sum_ = sum_of(batch, 32)
    total = torch.zeros(1, dtype=torch.int32)
    for slot in range(batch):
        sum_.add([ONE], [total], [torch.tensor([2.0 ** START["parameters"] * (1 - 2 * NEAR)])], slot == 0)
    assert 2**29 < int(total) < 2**31


@pytest.mark.parametrize("batch", [257, 1024])
def test_words_of_32_bits_are_refused_for_batches_too_large(batch: int) -> None:
    complaint = rf"global_batch={batch} is too large.*room for the gradients of 256 microbatches; use reduction_bits=64"
    with pytest.raises(ValueError, match=complaint):
        make_sum("reproducible", batch, 32)
    make_sum("reproducible", batch, 64)


@pytest.mark.parametrize("bits", [64, 32])
@given(steps=st.lists(st.tuples(st.integers(-40, 60), st.integers(-140, 128)), max_size=2 * WINDOW + 20))
def test_exponents_follow_the_largest_maximum_of_recent_steps(
    bits: int, steps: list[tuple[int, int]]
) -> None:
    """Only the last full window and the steps since count. Exponents that were saved and loaded go on alike."""
    exponents, resumed = exponents_of(8, bits), exponents_of(8, bits)
    for number, maxima in enumerate(steps, start=1):
        exponents.begin(number)
        if not exponents.fit(maxima):
            exponents.rerun(maxima)
        assert exponents.fit(maxima)
        exponents.commit(maxima)
    resumed.load_state_dict(json.loads(json.dumps(exponents.state_dict())))
    headroom = {0: HEADROOM, 1: HEADROOM if bits == 64 else 31 - 3 - PRECISION}
    for each in (exponents, resumed):
        each.begin(len(steps) + 1)
        for kind, family in enumerate(("losses", "parameters")):
            window = [maxima[kind] for maxima in steps[max(0, (len(steps) // WINDOW - 1) * WINDOW) :]]
            expected = max(LOWEST, max(window) + headroom[kind]) if window else START[family]
            assert each.current[kind] == expected
    assert resumed.state_dict() == exponents.state_dict()
    assert resumed.digest_of_history == exponents.digest_of_history
    assert resumed.digest == exponents.digest


@pytest.mark.parametrize("spike", [1, 2, WINDOW, WINDOW + 1])
def test_exponent_falls_again_after_a_spike(spike: int) -> None:
    """It falls at the end of the window after that of the spike: a spike widens the grid for 64 to 127 steps."""
    exponents, until = exponents_of(8), 0
    for number in range(1, 4 * WINDOW):
        exponents.begin(number)
        if number > spike and exponents.current[ONE] == 20 + HEADROOM:
            until = number
        elif number > spike:
            assert exponents.current[ONE] == -3 + HEADROOM
        maxima = maxima_of(20 if number == spike else -3, 0)
        if not exponents.fit(maxima):
            exponents.rerun(maxima)
        exponents.commit(maxima)
    assert WINDOW <= until - spike < 2 * WINDOW
    assert until % WINDOW == 0


def test_parameter_keeps_its_exponent_while_it_is_not_used() -> None:
    """An expert to which no token was routed for a long time does not begin again from a guess."""
    exponents = exponents_of(8, parameters=2)
    exponents.commit([3, -9, ZERO])
    for number in range(3 * WINDOW):
        exponents.begin(number + 1)
        exponents.commit([3, ZERO, ZERO])
    exponents.begin(1000)
    assert exponents.current.tolist() == [3 + HEADROOM, -9 + HEADROOM, START["parameters"]]


def test_parameters_keep_their_exponents_by_name() -> None:
    """This includes parameters that are added, removed or reordered, and buffers that are named later."""
    exponents = exponents_of(8)
    exponents.name("parameters", ["a", "b"])
    exponents.commit([1, -5, -8])
    exponents.name("buffers", ["mean"])
    assert exponents.current.tolist() == [1 + HEADROOM, -5 + HEADROOM, -8 + HEADROOM, START["buffers"]]
    exponents.name("parameters", ["b", "new", "a"])
    expected = [1 + HEADROOM, -8 + HEADROOM, START["parameters"], -5 + HEADROOM, START["buffers"]]
    assert exponents.current.tolist() == expected
    assert exponents.index_of("parameters") == {"b": 1, "new": 2, "a": 3}
    assert exponents.index_of("buffers") == {"mean": 4}


@pytest.mark.parametrize("bits", [64, 32])
def test_first_step_reruns_where_its_exponent_is_too_large(bits: int) -> None:
    """In the first step of a parameter, small gradients would lose bits on the grid of a guessed exponent."""
    exponents = exponents_of(16, bits, 2)
    exponents.begin(1)
    width = {64: 53, 32: 31}[bits] - 4
    least = START["parameters"] - width + PRECISION
    assert exponents.fit([ZERO, least, ZERO])
    maxima = [ZERO, least - 1, START["parameters"]]
    assert not exponents.fit(maxima)
    exponents.rerun(maxima)
    assert exponents.fit(maxima)
    headroom = min(HEADROOM, width - PRECISION)
    assert exponents.current.tolist() == [START["losses"], least - 1 + headroom, START["parameters"]]
    exponents.commit(maxima)
    exponents.begin(2)
    assert exponents.fit([ZERO, least - 30, START["parameters"]]), "a small gradient is no reason later on"


def test_rerun_changes_only_the_exponents_that_were_too_small() -> None:
    exponents = exponents_of(8, parameters=2)
    exponents.name("buffers", ["mean", "variance"])
    exponents.begin(1)
    maxima = [START["losses"], START["parameters"] + 1, 0, START["buffers"] + 3, ZERO]
    exponents.rerun(maxima)
    expected = [START["losses"], maxima[1] + HEADROOM, START["parameters"], maxima[3] + HEADROOM]
    assert exponents.current.tolist() == [*expected, START["buffers"]]
    assert exponents.fit(maxima)


def test_attempt_with_larger_exponents_than_required_is_rejected() -> None:
    """A replica that died had the largest value, and the rerun is without it: a run without failures would not have
    rerun."""
    exponents = exponents_of(8)
    exponents.begin(1)
    exponents.rerun([0, 40])
    assert exponents.fit([0, 40])
    assert not exponents.fit([0, 2])
    exponents.rerun([0, 2])
    assert exponents.current.tolist() == [START["losses"], START["parameters"]]


def test_maxima_that_differ_in_every_rerun_do_not_end_a_run() -> None:
    """Such maxima come from kernels that are not deterministic: no overflow is committed, and reruns come to an
    end."""
    exponents = exponents_of(8)
    exponents.begin(1)
    for rerun in range(RERUNS):
        assert not exponents.fit([0, 20 + rerun % 2])
        exponents.rerun([0, 20 + rerun % 2])
    assert exponents.fit([0, 20])
    assert exponents.fit([0, 25])
    assert not exponents.fit([0, 90])


def test_frequent_reruns_are_reported_once_in_a_hundred_steps() -> None:
    exponents, said = exponents_of(8), []
    for number in range(1, 151):
        exponents.begin(number)
        if number % 5 == 0:
            exponents.rerun([0, number + 100])
        exponents.commit([0, 0])
        said += [exponents.take_warning()]
    assert sum(map(bool, said)) == 2
    assert "11 reruns in the last 55 steps" in said[54]
    assert "1,024 times" in said[54]


def test_warning_of_32_bit_words_names_their_headroom_and_the_remedy() -> None:
    exponents = exponents_of(64, 32)
    exponents.begin(1)
    for number in range(11):
        exponents.rerun([0, number + 100])
    exponents.commit([0, 0])
    assert "more than 8 times" in (said := exponents.take_warning())
    assert "reduction_bits=64" in said


def test_step_left_and_begun_again_keeps_its_exponents() -> None:
    exponents = exponents_of(8)
    exponents.begin(3)
    exponents.rerun([0, 40])
    agreed = exponents.current.tolist()
    exponents.begin(3)
    assert exponents.current.tolist() == agreed
    exponents.begin(4)
    assert exponents.current.tolist() != agreed


@pytest.mark.parametrize("bits", [64, 32])
def test_exponents_of_version_0_1_are_loaded(bits: int) -> None:
    """One exponent for all gradients says nothing about a single parameter: parameters begin as in the first step."""
    exponents = exponents_of(8, bits, 2)
    exponents.name("buffers", ["mean"])
    exponents.load_state_dict({"maxima": [[2, 3, -4], [1, 4, -9]]})
    exponents.begin(3)
    start = START["parameters"]
    assert exponents.current.tolist() == [4 + HEADROOM, start, start, -4 + HEADROOM]
    exponents.load_state_dict({"maxima": []})
    assert exponents.current.tolist() == [START["losses"], start, start, START["buffers"]]
    with pytest.raises(ValueError, match="has 0 running buffers, and this model has 1"):
        exponents.load_state_dict({"maxima": [[1, 2]]})


def test_digest_of_grids_tells_exponents_and_words_apart() -> None:
    found = {tuple(exponents_of(8, bits, count).digest) for bits in (64, 32) for count in (1, 2)}
    other = exponents_of(8)
    other.rerun([0, 40])
    found.add(tuple(other.digest))
    assert len(found) == 5
    assert all(0 <= part < 2**31 for digest in found for part in digest)


def test_history_enters_the_digest() -> None:
    """The history is part of the fingerprint: replicas that would round the next steps to different grids are
    found."""
    exponents, seen = exponents_of(8, parameters=2), set()
    for maxima in ([0, 1, 2], [0, 1, 3], [0, 1, 3], [0, 1, ZERO]):
        seen.add(exponents.digest_of_history)
        exponents.commit(maxima)
    assert len({*seen, exponents.digest_of_history}) == 5


def test_unknown_reduction_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="'fast' or 'reproducible'"):
        make_sum("exact", 4)
