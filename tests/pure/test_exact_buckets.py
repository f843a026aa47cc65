"""Reproducible sums in buckets: bits, norms and memory, for words of 64 and of 32 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lone_world import World, begin
from torch.utils.checkpoint import checkpoint
from toy import MEMORY, Model, Stream, loss_of

import recover
from recover.gradients import deferred
from recover.gradients.exponents import codes_of
from recover.gradients.module_gradients import OwnedGradients
from recover.gradients.reduction import make_sum
from recover.gradients.replica_interface import PlainReplica
from recover.parallel import hsdp
from recover.parallel.hsdp import ShardedReplica

SIZES = (1e-12, 3.0, 2e-5, 1e10, 0.7)  # sizes of the gradients, by parameter
BITS = pytest.mark.parametrize("bits", [64, 32])


def parameters_of() -> list[torch.nn.Parameter]:
    """Parameters of several shapes; one is larger than the piece that the host rounds at a time."""
    shapes = ((3, 4), (7,), (300, 300), (1,), (5, 2))
    return [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32)) for shape in shapes]


def summed(bits: int, bucket_mb: float, order: Sequence[int] = range(8), limit: float = 1.0) -> Any:
    """The gradients and their norm after a step of 8 microbatches with the exponents that it requires."""
    parameters = parameters_of()
    gradients = OwnedGradients(parameters, bucket_mb, make_sum("reproducible", 8, bits))
    exponents = gradients.sum.exponents
    assert exponents is not None
    for attempt in range(2):
        gradients.begin()
        for slot in order:
            gradients.expect(None)
            generator = torch.Generator().manual_seed(slot)
            for parameter, size in zip(parameters, SIZES, strict=True):
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * size
            gradients.collect()
        if attempt == 0:
            exponents.rerun(codes_of(gradients.largest))
    gradients.post_all(lambda index, bucket: bucket.post(Alone(), 1, contribute=True))  # type: ignore[arg-type]
    (squared,) = gradients.squared_norms()
    gradients.install(8.0, [limit], gradients.usage)
    return [p.grad for p in parameters], squared**0.5, gradients


class Alone:
    """A group of one replica."""

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor) -> Any:
        out.copy_(source)
        return Done()


class Done:
    ok, refused = True, False

    def behind(self) -> None:
        return None


@pytest.mark.guarantee(
    "The trajectory",
    "The bits of a reproducible sum do not depend on how parameters are packed into buckets.",
)
@BITS
@pytest.mark.parametrize("far", [False, True])
def test_exact_bits_do_not_depend_on_buckets(monkeypatch: pytest.MonkeyPatch, bits: int, far: bool) -> None:
    """Nor do they depend on whether the gradients of a bucket are added one by one or together."""
    reference, norm, _ = summed(bits, 25.0)
    monkeypatch.setattr(deferred, "NEAR", () if far else ("cpu",))
    for bucket_mb in (25.0, 0.0001, 0.3):
        found, other, gradients = summed(bits, bucket_mb, range(7, -1, -1))
        assert all(map(torch.equal, found, reference))
        assert other == norm, len(gradients.buckets)


@BITS
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_exact_bits_do_not_depend_on_the_default_type_of_torch(bits: int, default: torch.dtype) -> None:
    """Users set the default type to create a model in bfloat16; gradients of its float32 parameters must keep their
    bits."""
    reference, norm, _ = summed(bits, 25.0)
    torch.set_default_dtype(default)
    try:
        parameters, other, _ = summed(bits, 25.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, parameters, reference))
    assert other == norm


@BITS
@pytest.mark.parametrize("far", [False, True])
def test_exact_norm_is_that_of_gradients_of_all_sizes(
    monkeypatch: pytest.MonkeyPatch, bits: int, far: bool
) -> None:
    """The gradients of each parameter are in its own unit; the norm is taken before the division by the weight."""
    monkeypatch.setattr(deferred, "NEAR", () if far else ("cpu",))
    found, norm, _ = summed(bits, 25.0)
    right = torch.cat([gradient.flatten().double() for gradient in found]).norm().item() * 8
    assert norm == pytest.approx(right, rel=1e-6)
    largest = SIZES.index(max(SIZES))
    assert norm == pytest.approx(found[largest].double().norm().item() * 8, rel=1e-6)


@BITS
def test_exact_gradients_are_clipped_alike(bits: int) -> None:
    found, _, _ = summed(bits, 25.0)
    clipped, _, _ = summed(bits, 25.0, limit=0.25)
    for one, other in zip(found, clipped, strict=True):
        torch.testing.assert_close(one * 0.25, other, rtol=2e-7, atol=0)


def test_small_words_lend_the_memory_of_their_sums() -> None:
    """8 bytes for each parameter instead of 20: the optimizer gets gradients in the memory of the sums."""
    found, _, gradients = summed(32, 25.0)
    memory = {bucket.result.untyped_storage().data_ptr() for bucket in gradients.buckets}
    assert {gradient.untyped_storage().data_ptr() for gradient in found} == memory
    assert all(bucket.local.dtype is bucket.result.dtype is torch.int32 for bucket in gradients.buckets)
    wide, _, gradients = summed(64, 25.0)
    memory = {bucket.result.untyped_storage().data_ptr() for bucket in gradients.buckets}
    assert not {gradient.untyped_storage().data_ptr() for gradient in wide} & memory


def test_small_words_lend_the_same_tensors_in_every_step() -> None:
    """To make the tensors of all parameters again would keep a device waiting."""
    _, _, gradients = summed(32, 25.0)
    lent: list[list[int]] = []
    for _ in range(3):
        gradients.release()
        gradients.install(8.0, [1.0], gradients.usage)
        lent.append([id(parameter.grad) for parameter in gradients.parameters])
    assert lent == [lent[0]] * 3


@BITS
def test_frozen_parameters_keep_their_exponents(bits: int) -> None:
    """A parameter that is unfrozen goes on where it was; a new one begins with the exponent of the first step."""
    parameters = parameters_of()
    gradients = OwnedGradients(parameters, 25.0, make_sum("reproducible", 8, bits))
    exponents = gradients.sum.exponents
    assert exponents is not None
    exponents.commit([3, -20, 1, -9, 30, -2])
    exponents.begin(2)
    before = exponents.current.tolist()
    parameters[0].requires_grad_(False)
    gradients.lay_out(parameters)
    assert exponents.current.tolist() == before
    assert [place.kind for place in gradients._slices] == [2, 3, 4, 5]
    parameters[0].requires_grad_(True)
    gradients.lay_out([*parameters, torch.nn.Parameter(torch.zeros(2))])
    assert exponents.current.tolist()[: len(before)] == before
    assert len(exponents.current) == len(before) + 1


class Stages(PlainReplica):
    """A replica whose ranks hold different parameters: this one holds the second and the fourth of five."""

    def names_of_all(self, names: list[str]) -> list[str]:
        assert names == ["b", "d"]
        return ["a", "b", "c", "d", "e"]


@pytest.mark.guarantee(
    "Grids (3D parallelism)",
    "Ranks of a replica that hold different parameters number the exponents of all of them alike.",
)
def test_ranks_of_a_pipeline_number_exponents_alike() -> None:
    mine = {torch.nn.Parameter(torch.zeros(2)): name for name in ("b", "d")}
    gradients = OwnedGradients(list(mine), 25.0, make_sum("reproducible", 8), Stages(), names=mine.copy)
    gradients.begin()
    gradients.expect(None)
    for parameter, name in mine.items():
        parameter.grad = torch.full((2,), {"b": 2.0, "d": 4.0}[name])
    gradients.collect()
    assert gradients.largest.tolist() == [0, 0, 2.0, 0, 4.0]
    exponents = gradients.sum.exponents
    assert exponents is not None
    assert exponents.size == 6, "of losses, and of five parameters"


@pytest.mark.guarantee(
    "Grids (3D parallelism)",
    "Ranks of a replica that hold different parameters number the exponents of all of them alike.",
)
def test_names_are_gathered_where_ranks_hold_different_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[list[str]] = []

    def gather(names: list[str], group: object) -> list[list[str]]:
        gathered.append(names)
        return [["b", "shared"], names]

    monkeypatch.setattr(hsdp, "gather_json", gather)
    replica = ShardedReplica.__new__(ShardedReplica)
    replica._gathered, replica._group = None, None  # type: ignore[assignment]
    assert replica.names_of_all(["z", "a"]) == ["z", "a"]
    assert gathered == [], "each rank has them all"
    replica.peers_hold_all_buffers = False
    for _ in range(2):
        assert replica.names_of_all(["shared", "a"]) == ["a", "b", "shared"]
    assert gathered == [["shared", "a"]], "once: peers do not come to a second time"


@BITS
def test_step_with_any_words_matches_fast_sums(bits: int) -> None:
    """The step also reports the settings that its bits depend on."""
    torch.manual_seed(0)
    model, twin = Model(always=True), Model(always=True)
    twin.load_state_dict(model.state_dict())
    exact = begin(World(), model, reduction="reproducible", reduction_bits=bits, buffers=MEMORY, clip=1.0)
    fast = begin(World(), twin, buffers=MEMORY, clip=1.0)
    for step, each in ((exact, model), (fast, twin)):
        while step.index < 3:
            for sample in step.microbatches(Stream()):
                step.backward(loss_of(each, sample))
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    assert exact.numerics["words"] == [{64: "torch.float64", 32: "torch.int32"}[bits]]
    assert fast.numerics["words"] == ["torch.float32"]


class SharedLayers(torch.nn.Module):
    """Eight layers with one bias. Reentrant checkpointing completes its gradient once for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for _ in range(8):
            x = checkpoint(self._layer, x, use_reentrant=True)
        return x.sum() * 28.0  # fits the exponent of the first step; the sum over 8 layers does not

    def _layer(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


@pytest.mark.guarantee(
    "The trajectory", "No sum of B gradients that fit their exponent leaves a word of 64 or of 32 bits."
)
@BITS
def test_gradient_that_comes_in_several_pieces_does_not_leave_its_word(bits: int) -> None:
    exact, fast = SharedLayers(), SharedLayers()
    for model, options in ((exact, {"reduction": "reproducible", "reduction_bits": bits}), (fast, {})):
        step = begin(World(), model, **options)
        for sample in step.microbatches([torch.ones(2)] * 8):
            step.backward(model(sample))
        assert step.grad_norm == pytest.approx((2 * (8 * 28) ** 2 + 2 * 28**2) ** 0.5, rel=1e-6)
    torch.testing.assert_close(exact.bias, fast.bias)


@pytest.mark.parametrize("in_round", [False, True])
def test_pieces_of_a_gradient_are_told_from_microbatches_of_a_round(in_round: bool) -> None:
    """Otherwise exponents, and so bits, would depend on how many microbatches a replica has in a round."""
    one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    gradients = OwnedGradients([one, other], 25.0, make_sum("reproducible", 8))
    gradients.begin()
    for number, (sizes, largest) in enumerate((((1.0, -4.0), 4.0 if in_round else 8.0), ((5.0, 6.0), 6.0))):
        if number:
            gradients.clear()
        gradients.expect(None, in_round=in_round)
        (3.0 * other.sum()).backward()
        for size in sizes[number:]:
            (size * one.sum()).backward()
        gradients.collect()
        assert gradients.largest.tolist() == [0.0, largest, 3.0]


def test_step_refuses_words_that_do_not_fit() -> None:
    for options, said in (
        ({"reduction_bits": 16, "reduction": "reproducible"}, "reduction_bits is 16; give 64 or 32"),
        ({"reduction_bits": 32}, "reduction_bits=32 belongs to reduction='reproducible'"),
    ):
        with pytest.raises(ValueError, match=said):
            begin(World(), Model(), **options)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"global_batch=257 is too large.*use reduction_bits=64"):
        step_of(model, optimizer, 257)
    step_of(model, optimizer, 256)


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> Any:
    return recover.Step(World(), model, optimizer, batch, reduction="reproducible", reduction_bits=32)  # type: ignore[arg-type]
