"""While microbatches run, a step reads nothing from its device; at the vote it reads everything at once.

With TEST_DEVICE=cuda the same tests run on a GPU, and there torch itself refuses operations that would wait for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lone_world import BATCH, World, begin
from toy import MEMORY, Model, Stream, loss_of

import recover
from recover.gradients import deferred
from recover.gradients.buckets import Bucket
from recover.gradients.deferred import DeviceValue, fetch, now
from recover.gradients.module_gradients import OwnedGradients
from recover.gradients.parts import on_device
from recover.gradients.reduction import ReproducibleSum
from recover.gradients.replica_interface import PlainReplica, Sharing
from recover.gradients.state_hash import WIDTH, fingerprint
from recover.policy import SlotSet
from recover.step.in_flight import MicrobatchesInFlight
from recover.step.transaction import Transaction

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Reads of tensors by the host, by the name of the method, and the beginning of the vote."""
    log: list[str] = []

    def telling(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def told(self: Any, *arguments: Any, **named: Any) -> Any:
            log.append(name)
            return method(self, *arguments, **named)

        return told

    def vote(self: Transaction) -> bool:
        waiting_is_an_error(False)
        log.append("vote")
        return voted(self)

    monkeypatch.setattr(deferred, "NEAR", ())  # treat the CPU as any other device
    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, telling(name, getattr(torch.Tensor, name)))
    monkeypatch.setattr(deferred, "_to_host", telling("transfer", deferred._to_host))
    voted = Transaction.vote
    monkeypatch.setattr(Transaction, "vote", vote)
    yield log
    waiting_is_an_error(False)


def waiting_is_an_error(on: bool) -> None:
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error" if on else "default")


def run(step: recover.Step, model: torch.nn.Module, stream: Stream, log: list[str]) -> None:
    """Run one step."""
    del log[:]
    for inputs, target, index in step.microbatches(stream):
        waiting_is_an_error(True)
        sample = on_device(inputs, DEVICE), on_device(target, DEVICE), index
        step.backward(loss_of(model, sample))


@pytest.mark.guarantee(
    "The trajectory",
    "The host reads no device value while microbatches run, and reads all values at once at the vote (GPU: "
    "`TEST_DEVICE=cuda`).",
)
@pytest.mark.parametrize(("reduction", "bits"), [("fast", 64), ("reproducible", 64), ("reproducible", 32)])
@pytest.mark.parametrize("buffers", [(), MEMORY], ids=["constant", "moving"])
def test_device_values_are_read_at_the_vote_only_and_all_at_once(
    log: list[str], reduction: str, bits: int, buffers: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    world, model = World(), Model().to(DEVICE).train(bool(buffers))
    world.log = world.cross._log = log
    step = begin(world, model, reduction=reduction, reduction_bits=bits, buffers=buffers, clip=1.0)
    for _ in range(3):
        step.compare_optimizers()
        run(step, model, Stream(), log)
        before = log[: log.index("vote")]
        assert set(before) <= {"bucket"}, f"the host has read a value while microbatches ran: {before}"
        at_vote = log[log.index("vote") : log.index("totals")]
        after_totals = log[log.index("totals") : log.index("agree")]
        for read in (at_vote, after_totals):
            assert read.count("transfer") == 1, read
            assert read.count("cpu") == (DEVICE.type == "cpu"), read
            assert read.count("item") == 0, read
        assert set(at_vote) <= {"vote", "transfer", "cpu", "numpy"}, at_vote
    assert step.index == 3
    assert math.isfinite(step.loss)
    assert step.grad_norm > 0
    assert step._engine.transaction.totals.paces[0] > 0, "the device's own time was not read"


class Equals:
    """A partner that computes the same as this rank."""

    size = 2

    def add_up(self, sums: torch.Tensor) -> None:
        sums.mul_(2)


class SharingReplica(PlainReplica):
    def sharing(self, parameter: torch.nn.Parameter) -> Sharing:
        return Sharing(copies=2, partners=PARTNER if parameter.dim() > 1 else None)


PARTNER = Equals()


def test_partner_usage_inside_a_replica_is_read_at_the_vote(log: list[str]) -> None:
    model = Model().to(DEVICE)
    gradients = OwnedGradients(model.parameters(), 0.002, ReproducibleSum(9), SharingReplica())
    gradients.begin()
    for index in (0, 1, 2):  # only the first microbatch uses all parameters
        gradients.expect(None, SlotSet.span(index, index + 1))
        sample = tuple(on_device(each, DEVICE) for each in Stream()[index][:2])
        waiting_is_an_error(True)
        loss_of(model, (*sample, index)).backward()
        gradients.collect()
        waiting_is_an_error(False)
    assert log == []
    fetch(gradients.unread)
    assert log.count("transfer") == 1
    assert gradients.usage == [1.0] * len(list(model.parameters()))
    assert (gradients.largest[1:] > 0).all()
    assert log.count("transfer") == 1, "it was read twice"


@pytest.mark.guarantee(
    "The trajectory",
    "The host reads no device value while microbatches run, and reads all values at once at the vote (GPU: "
    "`TEST_DEVICE=cuda`).",
)
def test_loss_counts_although_its_memory_is_reused() -> None:
    """The user reuses it, or a captured graph that writes each loss to the same place."""
    model = Model().to(DEVICE)
    world, stream = World(), Stream()
    step, place, losses = begin(world, model, buffers=MEMORY), torch.zeros((), device=DEVICE), []
    for inputs, target, index in step.microbatches(stream):
        loss = loss_of(model, (inputs.to(DEVICE), target.to(DEVICE), index))
        losses.append(float(loss.detach()))
        step.backward(place.copy_(loss))
        place = place.detach().zero_()
    assert step.loss == pytest.approx(sum(losses) / BATCH, rel=1e-12)


@pytest.mark.guarantee(
    "The trajectory",
    "The vote finds an overflow wherever it arose, and the repeated step keeps nothing of the first attempt.",
)
@pytest.mark.parametrize("struck", range(BATCH))
@pytest.mark.parametrize("bits", [64, 32])
def test_overflow_repeats_the_step_and_leaves_nothing_of_the_first_attempt(struck: int, bits: int) -> None:
    """One microbatch has a gradient of 1e9; its loss is as small as that of the others."""
    model, twin = (Model(always=True).to(DEVICE) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    exact = begin(World(), model, reduction="reproducible", reduction_bits=bits, buffers=MEMORY)
    fast = begin(World(), twin, reduction="fast", buffers=MEMORY)
    seen: list[int] = []
    for step, each in ((exact, model), (fast, twin)):
        for inputs, target, index in step.microbatches(Stream()):
            loss = loss_of(each, (inputs.to(DEVICE), target.to(DEVICE), index))
            seen.append(index)
            step.backward(loss + 1e9 * (loss - loss.detach()) if index == struck else loss)
    assert seen == [*range(BATCH)] * 3
    assert (exact.reruns, fast.reruns) == (1, 0)
    assert (exact.index, exact.skipped) == (1, 0)
    assert exact.loss == pytest.approx(fast.loss, rel=1e-6)
    assert exact.grad_norm == pytest.approx(fast.grad_norm, rel=1e-6)
    for name, value in twin.state_dict().items():
        # Words of 32 bits are off by 2^-22 of the largest gradient of a parameter.
        allowed = 1e-6 if bits == 64 else 2.0**-21 * float(value.abs().max())
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=allowed)


NUMBERS: dict[torch.dtype, list[Any]] = {
    torch.float64: [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324, 2.0**53 + 2],
    torch.float32: [0.1, -0.0, math.inf, 1e-45],
    torch.bfloat16: [3.0, -0.1, math.nan],
    torch.float16: [65504.0, 6e-8],
    torch.int64: [2**63 - 1, -(2**63), 2**53 + 1],
    torch.int32: [-(2**31)],
    torch.uint8: [255],
    torch.bool: [True, False],
}


@pytest.mark.guarantee(
    "The trajectory",
    "The host reads no device value while microbatches run, and reads all values at once at the vote (GPU: "
    "`TEST_DEVICE=cuda`).",
)
@given(st.lists(st.tuples(st.sampled_from(list(NUMBERS)), st.integers(0, 3)), max_size=12), st.booleans())
@settings(max_examples=60, deadline=None)
def test_device_values_of_every_type_arrive_unchanged(
    wanted: list[tuple[torch.dtype, int]], far: bool
) -> None:
    tensors = [torch.tensor(NUMBERS[dtype][:count], dtype=dtype, device=DEVICE) for dtype, count in wanted]
    tensors += [torch.tensor(values[0], dtype=dtype, device=DEVICE) for dtype, values in NUMBERS.items()]
    expected = [tensor.flatten().tolist() for tensor in tensors]
    laters = [DeviceValue(lambda numbers: numbers.tolist(), tensor) for tensor in tensors]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred, "NEAR", () if far else ("cpu",))
        fetch([*laters, *laters, 7, None])
    for tensor in tensors:
        tensor.zero_()
    for each, values in zip(laters, expected, strict=True):
        assert each.known
        assert np.array_equal(np.array(each.value), np.array(values), equal_nan=True)
        assert [math.copysign(1, v) for v in each.value] == [math.copysign(1, v) for v in values]


def test_deferred_value_is_computed_on_demand() -> None:
    assert (
        now(DeviceValue(lambda a, b: float(a[0] + b[0]), torch.ones(1), torch.ones((), dtype=torch.int64)))
        == 2.0
    )
    assert now(DeviceValue(lambda: 3.0)) == now(3.0) == 3.0


def test_fingerprint_is_of_the_parameters_at_call_time_on_every_device() -> None:
    shapes = [(7,), (), (3, 5), (0,), (2,), (16,), (3, WIDTH), (2 * WIDTH + 5,)]
    tensors = [torch.randn(shape) for shape in shapes] + [torch.randn(3).to(torch.bfloat16)]
    there = [tensor.to(DEVICE, copy=True) for tensor in tensors]
    hashed = fingerprint(there, 5, b"\1\0")
    for tensor in there:
        tensor.zero_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred, "NEAR", ("cpu",))
        assert hashed.value == fingerprint(tensors, 5, b"\1\0").value


class SlowDevice:
    """A clock whose device has finished as soon as its time is read."""

    def start(self) -> None:
        pass

    def took(self) -> DeviceValue[float]:
        return DeviceValue(lambda: 0.25)


@pytest.mark.guarantee(
    "State and samples",
    "A device error, which arrives late, is attributed to all microbatches it may belong to.",
)
def test_device_error_is_attributed_to_all_possible_microbatches() -> None:
    shown: list[list[tuple[int, int]]] = []
    notes: list[list[tuple[int, int]]] = []
    world = World()
    world.board.compute = lambda rank, slots: shown.append(list(slots))
    world.notes.leave = lambda step, suspects, why: notes.append(list(suspects))
    samples, randomness = (
        SimpleNamespace(index=lambda step, slot: slot),
        SimpleNamespace(read=lambda *_: None),
    )
    handed_out = MicrobatchesInFlight(world, samples, randomness, SlowDevice())  # type: ignore[arg-type]
    took = []
    for slot in (3, 4):
        handed_out.read([None] * 9, 1, [slot])
        took.append(handed_out.computed())
    assert shown[-1] == [(3, 3), (4, 4)], "the device is still busy with them"
    handed_out.read([None] * 9, 1, [5])
    for error in (ValueError(), torch.AcceleratorError()):
        handed_out.blame(error)
    assert notes == [[(5, 5)], [(3, 3), (4, 4), (5, 5)]]
    took.append(handed_out.computed())
    assert [now(seconds) for seconds in took[:2]] == [0.25, 0.25]
    assert shown[-1] == [(5, 5)]
    fetch(took)
    handed_out.blame(torch.AcceleratorError())
    assert shown[-1] == []
    assert len(notes) == 2, "what the device is through with is not to blame"


@pytest.mark.guarantee(
    "Membership",
    "A value derived from a sum waits for it on the device of the sum, whichever device is current.",
)
def test_result_is_awaited_on_its_own_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank may compute on cuda:1 without having made it the current device."""
    waits: list[tuple[Any, Any]] = []

    def current_stream(device: Any = "the current device") -> SimpleNamespace:
        return SimpleNamespace(wait_event=lambda event: waits.append((device, event)))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    result = SimpleNamespace(is_cuda=True, device="cuda:1", shape=(3,), new_empty=lambda shape: result)
    group = SimpleNamespace(all_reduce=lambda *_: SimpleNamespace(behind=lambda: "passed"))
    bucket = Bucket(result)
    bucket.post(group, 1, contribute=True)  # type: ignore[arg-type]
    assert bucket.is_coming()
    assert waits == [("cuda:1", "passed")]
