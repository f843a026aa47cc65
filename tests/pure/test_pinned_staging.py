"""Data travel from a device through the host and back: the numbers are right whenever the device runs its copies."""

from __future__ import annotations

import random
import threading
from functools import partial

import numpy as np
import pytest
import torch
from streams import LateDevice

from recover.world.carriers.base import Array
from recover.world.carriers.contract import CarrierError
from recover.world.carriers.pinned_staging import SLOTS, PinnedStaging
from recover.world.carriers.worker import Worker

GROUP, NEXT = "that of now", "that after a failure"
PIECE = 64  # bytes: 16 float32 numbers


def make_staging(device: LateDevice) -> PinnedStaging:
    return PinnedStaging(device.stream(), device.stream(), device.pinned, piece=PIECE)


def doubled(piece: Array) -> None:
    piece *= 2


class Wire:
    """A network like gloo's: a sum is complete only when one or two threads have waited for it, and several may be
    under way."""

    def __init__(self) -> None:
        self.under_way = self.most = self.begun = 0
        self.dies_at = 0
        self._lock = threading.Lock()

    def begin(self, piece: Array):  # type: ignore[no-untyped-def]
        with self._lock:
            self.under_way += 1
            self.begun += 1
            self.most = max(self.most, self.under_way)
            dies = self.dies_at and self.begun >= self.dies_at
        value = [piece.copy()]
        piece[...] = np.nan

        def wait() -> None:
            with self._lock:
                if dies:
                    raise CarrierError("a peer has died")
                if value:
                    piece[...] = value.pop() * 2
                    self.under_way -= 1

        return wait


@pytest.mark.guarantee(
    "Membership",
    "Pinned staging delivers right data whenever the device copies, and delivers nothing after a failure.",
)
@pytest.mark.parametrize("seed", [None, *range(20)])
@pytest.mark.parametrize("count", [1, 16, 17, 16 * SLOTS, 16 * (3 * SLOTS) + 5])
@pytest.mark.parametrize("in_place", [False, True])
def test_pinned_staging_returns_every_piece_whenever_the_device_copies(
    seed: int | None, count: int, in_place: bool
) -> None:
    device = LateDevice(seed)
    staging, producer, wire = make_staging(device), device.stream(), Wire()
    for turn in range(3):  # the slots are used again and again
        values = torch.arange(count, dtype=torch.float32) + turn
        source = torch.full((count,), -1.0)
        producer.copy(source, values)  # queued, and perhaps not done yet
        producer.record().synchronize()  # as by the carrier's `follow`
        out = source if in_place else torch.full((count,), -2.0)
        begin = wire.begin if turn % 2 else doubled
        staging.through(source, out, begin, GROUP).wait()
        torch.testing.assert_close(out, values * 2, rtol=0, atol=0)
        if not in_place:
            torch.testing.assert_close(source, values, rtol=0, atol=0)
    assert wire.most == (2 if count > 16 else 1)  # two pieces at once, not all of them


@pytest.mark.parametrize("seed", range(20))
def test_pinned_staging_overlaps_operations_and_keeps_their_data_apart(seed: int) -> None:
    device, chance = LateDevice(seed), random.Random(seed)
    staging, wire, worker = make_staging(device), Wire(), Worker()
    counts = [chance.choice([1, 16, 17, 16 * SLOTS, 0]) for _ in range(12)]
    sources = [torch.arange(count, dtype=torch.float32) + 100 * n for n, count in enumerate(counts)]
    outs = [torch.full_like(source, -2.0) for source in sources]
    go = threading.Event()
    worker.post(go.wait)  # all operations are posted before the first begins
    works = []
    for n, (source, out) in enumerate(zip(sources, outs, strict=True)):
        begin = doubled if n % 5 == 4 else wire.begin
        works.append(worker.post(partial(staging.through, source, out, begin, GROUP)))
    go.set()
    for work, source, out in zip(works, sources, outs, strict=True):
        assert work.wait(30.0), work.error
        assert out.tolist() == (source * 2).tolist()
    assert wire.under_way == 0
    assert wire.most <= 2


def test_pinned_staging_begins_a_small_operation_during_the_previous_one() -> None:
    staging, wire = make_staging(LateDevice()), Wire()
    outs = torch.zeros(16), torch.zeros(16)
    first, second = (staging.through(torch.ones(16), out, wire.begin, GROUP) for out in outs)
    assert wire.most == 2
    second.wait()
    first.wait()
    assert [out.tolist() for out in outs] == [[2.0] * 16] * 2


def test_pinned_staging_retires_the_slot_of_a_failed_last_piece() -> None:
    staging, wire, used = make_staging(LateDevice()), Wire(), list[int]()
    wire.dies_at = 1

    def begin(piece: Array):  # type: ignore[no-untyped-def]
        used.append(piece.ctypes.data)
        return wire.begin(piece)

    with pytest.raises(CarrierError):
        staging.through(torch.ones(16), torch.zeros(16), begin, GROUP).wait()
    wire.dies_at = 0
    staging.through(torch.ones(16 * SLOTS), torch.zeros(16 * SLOTS), begin, NEXT).wait()
    assert len(set(used)) == 1 + SLOTS


def test_failed_group_uses_no_slot_of_its_own_pending_operations() -> None:
    """The first operation is on the wire, the second fails when three more slots are filled: the third must not be
    accepted."""
    staging, wire = make_staging(LateDevice()), Wire()
    out = torch.zeros(16)
    first = staging.through(torch.ones(16), out, wire.begin, GROUP)

    def refuses(_piece: Array) -> None:
        raise CarrierError("the group was freed after a death")

    for begin in (refuses, wire.begin):
        with pytest.raises(CarrierError):
            staging.through(torch.full((48,), 3.0), torch.zeros(48), begin, GROUP)
    first.wait()
    assert out.tolist() == [2.0] * 16


@pytest.mark.parametrize("dies_at", range(1, 8))
@pytest.mark.parametrize("seed", range(5))
def test_completed_operation_keeps_its_data_and_failed_slots_are_unused(dies_at: int, seed: int) -> None:
    """A peer dies while pieces of two operations are on the wire: neither piece is taken for the other."""
    device = LateDevice(seed)
    staging, wire, worker = make_staging(device), Wire(), Worker()
    wire.dies_at = dies_at
    given: set[int] = set()

    def begin(piece: Array):  # type: ignore[no-untyped-def]
        given.add(piece.ctypes.data)
        return wire.begin(piece)

    sources = [torch.arange(24, dtype=torch.float32) + 100 * n for n in range(4)]  # two pieces each
    outs = [torch.zeros(24) for _ in sources]
    works = [
        worker.post(partial(staging.through, source, out, begin, GROUP))
        for source, out in zip(sources, outs, strict=True)
    ]
    ended = [work.wait(30.0) for work in works]
    assert ended == [n < (dies_at - 1) // 2 for n in range(4)]
    for source, out in list(zip(sources, outs, strict=True))[: (dies_at - 1) // 2]:
        assert out.tolist() == (source * 2).tolist()
    used: list[int] = []

    def note(piece: Array) -> None:
        used.append(piece.ctypes.data)

    staging.through(torch.ones(16 * 6), torch.zeros(16 * 6), note, NEXT).wait()
    assert not given & set(used)


@pytest.mark.parametrize("kind", [torch.float64, torch.int64, torch.bfloat16])
def test_other_types_are_sent_unchanged_or_as_float32(kind: torch.dtype) -> None:
    device = LateDevice()
    staging = make_staging(device)
    source, seen = torch.arange(40).to(kind), set()

    def begin(piece: Array) -> None:
        seen.add(str(piece.dtype))
        piece *= 2

    out = torch.empty_like(source)
    staging.through(source, out, begin, GROUP).wait()
    assert out.tolist() == [2 * number for number in range(40)]
    assert seen == {"float32" if kind is torch.bfloat16 else str(kind).removeprefix("torch.")}


@pytest.mark.guarantee(
    "Membership",
    "Pinned staging delivers right data whenever the device copies, and delivers nothing after a failure.",
)
def test_pinned_staging_copies_nothing_back_after_a_failure() -> None:
    device = LateDevice()
    staging = make_staging(device)
    source, out, given = torch.ones(16 * 6), torch.zeros(16 * 6), list[Array]()

    def fails_at_the_third(piece: Array) -> None:
        given.append(piece)
        if len(given) == 3:
            raise CarrierError("a peer has died")
        piece *= 2

    with pytest.raises(CarrierError):
        staging.through(source, out, fails_at_the_third, GROUP)
    assert out[:32].tolist() == [2.0] * 32  # copies under way to the device have arrived
    used: list[int] = []

    def note(piece: Array) -> None:
        used.append(piece.ctypes.data)

    staging.through(source, torch.zeros(16 * 6), note, NEXT).wait()
    assert not {piece.ctypes.data for piece in given} & set(used)
    before = given[0].ctypes.data
    given.clear()
    with pytest.raises(CarrierError):
        staging.through(source, out, fails_at_the_third, NEXT)
    staging.through(source, torch.zeros(16 * 6), note, GROUP).wait()
    assert before in used  # two sets take turns: failures do not use memory up
