"""From a device through the host and back: the right numbers, whenever the device does what it was asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from streams import LateDevice

from recover.carriers.base import Array, Ready
from recover.carriers.contract import CarrierError
from recover.carriers.lanes import SLOTS, Lanes

PIECE = 64  # bytes: 16 numbers of float32


def make_lanes(device: LateDevice) -> Lanes:
    return Lanes(device.stream(), device.stream(), device.pinned, piece=PIECE)


def doubled(piece: Array) -> None:
    piece *= 2


class Wire:
    """As gloo's: a sum is there only when it was waited for, and several may be under way."""

    def __init__(self) -> None:
        self.under_way = self.most = 0

    def begin(self, piece: Array):  # type: ignore[no-untyped-def]
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        value = piece.copy()
        piece[...] = np.nan

        def wait() -> None:
            piece[...] = value * 2
            self.under_way -= 1

        return wait


@pytest.mark.parametrize("seed", [None, *range(20)])
@pytest.mark.parametrize("count", [1, 16, 17, 16 * SLOTS, 16 * (3 * SLOTS) + 5])
@pytest.mark.parametrize("in_place", [False, True])
def test_every_piece_comes_back_whenever_the_device_does_its_part(
    seed: int | None, count: int, in_place: bool
) -> None:
    device = LateDevice(seed)
    lanes, producer, wire = make_lanes(device), device.stream(), Wire()
    for turn in range(3):  # the slots are used again and again
        values = torch.arange(count, dtype=torch.float32) + turn
        source = torch.full((count,), -1.0)
        producer.copy(source, values)  # asked for, and perhaps not done yet
        ready = Ready()
        ready.events = [producer.record()]
        out = source if in_place else torch.full((count,), -2.0)
        begin = wire.begin if turn % 2 else doubled
        lanes.through(source, out, ready, begin).wait()
        torch.testing.assert_close(out, values * 2, rtol=0, atol=0)
        if not in_place:
            torch.testing.assert_close(source, values, rtol=0, atol=0)
    assert wire.most == (2 if count > 16 else 1)  # two pieces at once, not all of them


@pytest.mark.parametrize("kind", [torch.float64, torch.int64, torch.bfloat16])
def test_other_types_travel_as_themselves_or_as_float32(kind: torch.dtype) -> None:
    device = LateDevice()
    lanes = make_lanes(device)
    source, seen = torch.arange(40).to(kind), set()

    def begin(piece: Array) -> None:
        seen.add(str(piece.dtype))
        piece *= 2

    out = torch.empty_like(source)
    lanes.through(source, out, Ready(), begin).wait()
    assert out.tolist() == [2 * number for number in range(40)]
    assert seen == {"float32" if kind is torch.bfloat16 else str(kind).removeprefix("torch.")}


def test_the_result_is_not_overwritten_before_its_reader_is_through() -> None:
    """The optimizer may still be reading the last step's result when this step's first bucket comes back."""
    device = LateDevice()
    lanes, reader = make_lanes(device), device.stream()
    source, out, seen = torch.ones(40), torch.full((40,), 5.0), torch.zeros(40)
    reader.copy(seen, out)  # asked for, and not done yet
    ready = Ready()
    ready.events = [reader.record()]
    lanes.through(source, out, ready, doubled).wait()
    assert seen.tolist() == [5.0] * 40


def test_after_a_failure_nothing_more_comes_up_and_the_slots_that_the_library_may_write_to_rest() -> None:
    device = LateDevice()
    lanes = make_lanes(device)
    source, out, given = torch.ones(16 * 6), torch.zeros(16 * 6), list[Array]()

    def fails_at_the_third(piece: Array) -> None:
        given.append(piece)
        if len(given) == 3:
            raise CarrierError("a peer has died")
        piece *= 2

    with pytest.raises(CarrierError):
        lanes.through(source, out, Ready(), fails_at_the_third)
    assert out[:32].tolist() == [2.0] * 32  # what was on its way up has arrived
    used: list[int] = []

    def note(piece: Array) -> None:
        used.append(piece.ctypes.data)

    lanes.through(source, torch.zeros(16 * 6), Ready(), note).wait()
    assert not {piece.ctypes.data for piece in given} & set(used)
    before = given[0].ctypes.data
    given.clear()
    with pytest.raises(CarrierError):
        lanes.through(source, out, Ready(), fails_at_the_third)
    lanes.through(source, torch.zeros(16 * 6), Ready(), note).wait()
    assert before in used  # two sets take turns: failures do not use memory up
