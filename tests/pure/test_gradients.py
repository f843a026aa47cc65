"""Gradient buckets in one process: their sums, their memory, when it is freed, and the order in which they are
posted."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from recover.faults.damage import flip
from recover.gradients import deferred
from recover.gradients.buckets import Bucket
from recover.gradients.module_gradients import OwnedGradients
from recover.gradients.reduction import ReproducibleSum, make_sum
from recover.gradients.replica_interface import PLAIN, PlainReplica, mark, replica_of
from recover.gradients.state_hash import fingerprint


def model_of(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4))).to(dtype)


def run(gradients: OwnedGradients, model: torch.nn.Module, inputs: torch.Tensor, last: bool) -> list[int]:
    """Run one microbatch, and return the order in which buckets were posted."""
    posted: list[int] = []
    gradients.expect((lambda index, bucket: posted.append(index)) if last else None)
    model(inputs).square().mean().backward()
    gradients.collect()
    return posted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_hold_the_fp32_sum_over_microbatches(dtype: torch.dtype) -> None:
    model, reference = model_of(dtype), model_of(dtype)
    gradients = OwnedGradients(model.parameters(), bucket_mb=0.005)
    gradients.begin()
    expected = [torch.zeros_like(p, dtype=torch.float32) for p in reference.parameters()]
    for seed in range(3):
        inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)
        run(gradients, model, inputs, last=seed == 2)
        reference.zero_grad()
        reference(inputs).square().mean().backward()
        for total, parameter in zip(expected, reference.parameters(), strict=True):
            total += parameter.grad
        assert all(p.grad is None for p in model.parameters()), "a gradient was not freed"
    for bucket in gradients.buckets:
        assert bucket.local.dtype == torch.float32
        bucket.result.copy_(bucket.local)
    gradients.install(2.0, [1.0], gradients.usage)
    for total, parameter in zip(expected, model.parameters(), strict=True):
        assert parameter.grad.dtype == dtype
        torch.testing.assert_close(
            parameter.grad.float(), total * 0.5, rtol=1e-2 if dtype != torch.float32 else 1e-6, atol=1e-6
        )


@pytest.mark.guarantee("Work kept after a death", "Reductions run while backward runs.")
def test_buckets_are_posted_in_one_order_while_backward_runs() -> None:
    model = model_of()
    gradients = OwnedGradients(model.parameters(), bucket_mb=0.005)
    assert len(gradients.buckets) == 4
    seen: list[tuple[int, bool]] = []
    first_layer_done = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: first_layer_done.append(True))
    gradients.begin()
    gradients.expect(lambda index, bucket: seen.append((index, bool(first_layer_done))))
    model(torch.randn(4, 32)).sum().backward()
    gradients.collect()
    assert [index for index, _ in seen] == [0, 1, 2, 3]
    assert seen[0] == (0, False), (
        "the last layers' bucket was not posted before backward reached the first layer"
    )


def test_unused_parameters_count_as_zero() -> None:
    used, unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    gradients = OwnedGradients([*used.parameters(), *unused.parameters()], bucket_mb=1)
    elsewhere = torch.tensor([True, True, True, False])  # another replica has used the unused weight, too
    for bucket in gradients.buckets:
        bucket.local.fill_(7.0)  # left over from an earlier step
    gradients.begin()
    assert run(gradients, used, torch.randn(2, 4), last=True) == [0]
    (bucket,) = gradients.buckets
    bucket.result.copy_(bucket.local)
    assert gradients.usage == [1, 1, 0, 0]
    gradients.install(1.0, [1.0], elsewhere)
    assert unused.weight.grad.abs().max() == 0
    assert unused.bias.grad is None, "nobody has used it, and an optimizer would decay it"
    assert used.weight.grad.abs().max() > 0


def test_tied_weights_are_summed_once() -> None:
    layer, reference = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    reference.load_state_dict(layer.state_dict())
    gradients = OwnedGradients(layer.parameters(), bucket_mb=1)
    gradients.begin()
    inputs = torch.randn(4, 8)
    run(gradients, lambda x: layer(layer(x)), inputs, last=True)  # type: ignore[arg-type]
    reference(reference(inputs)).square().mean().backward()
    (bucket,) = gradients.buckets
    bucket.result.copy_(bucket.local)
    gradients.install(1.0, [1.0], gradients.usage)
    torch.testing.assert_close(layer.weight.grad, reference.weight.grad)


def one(gradients: OwnedGradients, loss: torch.Tensor) -> None:
    """Run a step of one microbatch, up to the gradients that the optimizer gets."""
    gradients.begin()
    gradients.expect(lambda index, bucket: None)
    loss.backward()
    gradients.collect()
    for bucket in gradients.buckets:
        bucket.result.copy_(bucket.local)
    gradients.install(1.0, [1.0], gradients.usage)


@pytest.mark.guarantee(
    "Trained parameters",
    "Gradients in float64 are summed in float64, complex ones keep both parts, and sparse ones are refused.",
)
def test_gradients_are_summed_in_the_precision_of_their_parameters() -> None:
    """There is a bucket for each type: nothing of a float64 gradient is lost, and float32 buckets stay as small as
    they were."""
    double = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    single, half = torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(3, dtype=torch.float16))
    gradients = OwnedGradients([double, single, half], bucket_mb=1)
    assert {b.local.dtype: b.local.numel() for b in gradients.buckets} == {torch.float32: 6, torch.float64: 5}
    one(gradients, (double / 3).sum() + (single / 3).sum() + half.sum())
    assert torch.equal(double.grad, torch.full((5,), 1 / 3, dtype=torch.float64))
    assert single.grad.dtype == torch.float32
    assert half.grad.dtype == torch.float16
    with pytest.raises(ValueError, match=r"rounds each gradient to float32.*reduction='fast'"):
        OwnedGradients([double], bucket_mb=1, sum=ReproducibleSum(4))


@pytest.mark.guarantee(
    "Trained parameters",
    "Gradients in float64 are summed in float64, complex ones keep both parts, and sparse ones are refused.",
)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("exact", [False, True])
def test_complex_gradients_keep_both_parts(dtype: torch.dtype, exact: bool) -> None:
    odd, turned = torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(2, 3, dtype=dtype))
    if exact and dtype == torch.complex128:
        with pytest.raises(ValueError, match="reduction='fast'"):
            OwnedGradients([turned, odd], bucket_mb=1, sum=ReproducibleSum(1))
        return
    gradients = OwnedGradients([turned, odd], bucket_mb=1, sum=ReproducibleSum(1) if exact else None)
    twin = turned.detach().clone().requires_grad_()

    def loss(value: torch.Tensor) -> torch.Tensor:
        return (value * (0.2 + 0.3j)).abs().square().sum() + value.conj().imag.sum() + odd.sum()

    loss(twin).backward()
    odd.grad = None
    one(gradients, loss(turned))
    torch.testing.assert_close(turned.grad, twin.grad, rtol=1e-6, atol=1e-6)
    assert twin.grad.imag.abs().max() > 0
    before = fingerprint([turned.detach()], 1).value
    flip(turned.detach())
    assert fingerprint([turned.detach()], 1).value != before


@pytest.mark.guarantee(
    "Trained parameters",
    "Gradients in float64 are summed in float64, complex ones keep both parts, and sparse ones are refused.",
)
def test_sparse_gradient_is_refused_by_name() -> None:
    words = torch.nn.Embedding(4, 2, sparse=True)
    gradients = OwnedGradients(words.parameters(), bucket_mb=1, names=lambda: {words.weight: "words.weight"})
    with pytest.raises(RuntimeError, match=r"words\.weight is sparse.*sparse=False"):
        one(gradients, words(torch.tensor([1])).sum())


@pytest.mark.guarantee("Trained parameters", "A parameter that is unfrozen within a step is refused.")
def test_trained_parameters_may_change_between_steps_and_not_within() -> None:
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    second.requires_grad_(False)
    gradients = OwnedGradients([first, second], bucket_mb=1)
    one(gradients, (first * second).sum())
    assert second.grad is None
    gradients.release()
    first.requires_grad_(False)
    second.requires_grad_(True)
    gradients.lay_out([first, second])
    one(gradients, (first * second).sum())
    assert first.grad is None
    assert second.grad is not None
    gradients.release()
    first.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"was frozen when the step began.*between two steps"):
        one(gradients, (first * second).sum())
    first.grad = None
    gradients.lay_out([first, second])
    one(gradients, (first * second).sum())
    assert first.grad.tolist() == second.grad.tolist() == [1.0] * 3, (
        "a hook of an earlier layout counted as well"
    )


@pytest.mark.guarantee("Work kept after a death", "Gradients take 8 bytes per parameter.")
def test_gradients_take_eight_bytes_per_parameter() -> None:
    """Stock DDP holds `p.grad` and a bucket (8 bytes), or 4 bytes with gradients as views: this is at most 4 more."""
    model = model_of()
    gradients = OwnedGradients(model.parameters(), bucket_mb=0.005)
    held = sum(t.numel() * t.element_size() for b in gradients.buckets for t in (b.local, b.result))
    assert held == 8 * sum(p.numel() for p in model.parameters())


def test_second_gradient_after_its_bucket_was_posted_is_refused() -> None:
    layer = torch.nn.Linear(2, 2, bias=False)
    gradients = OwnedGradients(layer.parameters(), bucket_mb=1)
    gradients.begin()
    gradients.expect(lambda index, bucket: None)
    layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="second gradient"):
        layer(torch.ones(1, 2)).sum().backward()


@pytest.mark.guarantee(
    "Work kept after a death",
    "Gradients are added in the order of their arrival, also several of one parameter, and none is lost.",
)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=12), min_size=1, max_size=3),
    st.integers(1, 6),
    st.sampled_from(["fast", "reproducible"]),
    st.booleans(),
)
@example(
    [[3, 2, 3, 5, 4]], 2, "fast", True
)  # a second gradient in a full bucket that waits for the bucket before it
@settings(max_examples=80, deadline=None)
def test_gradient_sums_follow_the_order_of_arrival(
    microbatches: list[list[int]], in_a_bucket: int, reduction: str, far: bool
) -> None:
    """Some parameters get no gradient, some get several, in any order, until a bucket is handed over. On a device this
    is the case in rounds: autograd must not add up the microbatches of a round."""
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(6)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred, "NEAR", () if far else ("cpu",))
        gradients = OwnedGradients(parameters, 3 * 4 * in_a_bucket / (1 << 20), make_sum(reduction, 64))
    assert len(gradients.buckets) == -(-6 // in_a_bucket)
    expected: dict[int, torch.Tensor] = {}
    posted: dict[int, torch.Tensor] = {}
    gradients.begin()
    for number, arrivals in enumerate(microbatches):
        last = number == len(microbatches) - 1
        post = (lambda i, bucket: posted.update({i: bucket.local.clone()})) if last else None
        gradients.expect(post, in_round=far)
        for at, which in enumerate(arrivals):
            factor = torch.tensor([0.1, -0.7, 3.3]) / (1 + at + number)
            loss = (parameters[which] * factor).sum()
            if (5 - which) // in_a_bucket in posted:
                with pytest.raises(RuntimeError, match="second gradient"):
                    loss.backward()
                parameters[which].grad = None
                continue
            loss.backward()
            if reduction == "reproducible":
                (unit,) = gradients.sum.units([1 + which])
                factor = (factor / unit).round().double()
            expected[which] = expected[which] + factor if which in expected else factor.clone()
        gradients.collect()
    rows = [expected.get(which, torch.zeros(3)) for which in reversed(range(6))]
    assert torch.equal(torch.cat([posted[i] for i in range(len(posted))]), torch.cat(rows))
    assert gradients.usage == [float(which in expected) for which in range(6)]
    assert math.isfinite(gradients.largest.sum())


@pytest.mark.guarantee(
    "Work kept after a death",
    "Pending gradients are at most those of one bucket on a GPU, and of one parameter on the host.",
)
@pytest.mark.parametrize(("far", "most"), [(False, 1), (True, 3)])
def test_pending_gradients_are_at_most_those_of_one_bucket(
    monkeypatch: pytest.MonkeyPatch, far: bool, most: int
) -> None:
    """On the host they are at most those of one parameter."""
    monkeypatch.setattr(deferred, "NEAR", () if far else ("cpu",))
    model = model_of()
    made: list[Any] = []
    alive: list[int] = []

    def note(parameter: torch.nn.Parameter) -> None:
        made.append(weakref.ref(parameter.grad))
        alive.append(sum(each() is not None for each in made))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    gradients = OwnedGradients(model.parameters(), bucket_mb=0.005)
    gradients.begin()
    run(gradients, model, torch.randn(2, 32), last=False)
    assert len(alive) == 8
    assert max(alive) == most, "as many parameters as have room in a bucket of this size, or one"


@pytest.mark.parametrize(("far", "sizes"), [(False, [6, 6, 3]), (True, [12, 3])])
def test_device_sums_few_large_buckets(monkeypatch: pytest.MonkeyPatch, far: bool, sizes: list[int]) -> None:
    monkeypatch.setattr(deferred, "NEAR", () if far else ("cpu",))
    parameters = [torch.nn.Parameter(torch.empty(1 << 20)) for _ in range(15)]  # 4 MiB each
    assert [b.local.numel() >> 20 for b in OwnedGradients(parameters, None).buckets] == sizes


class Dispatches(TorchDispatchMode):
    """Records the operations that a device would get."""

    def __init__(self) -> None:
        super().__init__()
        self.told: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.told[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.guarantee(
    "Work kept after a death", "The device is called once per bucket and not once per gradient."
)
@pytest.mark.parametrize(("reduction", "bits"), [("fast", 64), ("reproducible", 64), ("reproducible", 32)])
def test_device_is_called_per_bucket_and_not_per_gradient(
    monkeypatch: pytest.MonkeyPatch, reduction: str, bits: int
) -> None:
    monkeypatch.setattr(deferred, "NEAR", ())
    told: list[dict[str, int]] = []
    for count in (3, 40):
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]
        gradients = OwnedGradients(parameters, bucket_mb=1, sum=make_sum(reduction, 4, bits))
        gradients.begin()
        with Dispatches() as device:
            for _ in range(2):
                gradients.expect(None)
                for parameter in parameters:
                    parameter.grad = torch.ones(2)
                gradients.collect()
        told.append({name: times for name, times in device.told.items() if not name.startswith("ones")})
    assert told[0] == told[1]
    assert told[0]["_foreach_copy_.default"] == (2 if bits == 32 else 1)


def test_model_without_gradients_is_refused() -> None:
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        OwnedGradients(frozen.parameters(), bucket_mb=1)


class FakeWork:
    ok = True


class FakeGroup:
    """A group of two equal replicas."""

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor | None = None) -> FakeWork:
        (source if out is None else out).copy_(source * 2)
        return FakeWork()


@pytest.mark.guarantee("The trajectory", "A result that was reduced under another epoch is never used.")
@pytest.mark.parametrize("in_place", [False, True])
def test_bucket_of_another_epoch_is_stale_and_can_be_rewound(in_place: bool) -> None:
    bucket = Bucket(torch.ones(4), in_place)
    bucket.post(FakeGroup(), epoch=1, contribute=True)  # type: ignore[arg-type]
    assert bucket.reduced_under(1)
    assert not bucket.reduced_under(2)
    assert bucket.result.tolist() == [2.0] * 4
    bucket.rewind()
    assert bucket.local.tolist() == [1.0] * 4
    assert not bucket.reduced_under(1)


@pytest.mark.parametrize("in_place", [False, True])
def test_spare_contributes_zeros_and_keeps_its_sum(in_place: bool) -> None:
    bucket = Bucket(torch.ones(4), in_place)
    bucket.post(FakeGroup(), epoch=1, contribute=False)  # type: ignore[arg-type]
    assert bucket.result.tolist() == [0.0] * 4
    bucket.rewind()
    assert bucket.local.tolist() == [1.0] * 4


def test_module_is_found_inside_its_wrapper() -> None:
    part = torch.nn.Linear(2, 2)
    mark(part, replica := PlainReplica())
    assert replica_of(torch.nn.Sequential(torch.nn.ReLU(), part)) is replica
    assert replica_of(torch.nn.Linear(2, 2)) is PLAIN
