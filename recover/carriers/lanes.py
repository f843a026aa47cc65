"""From a device through the host's wire and back, in pieces: while one piece travels down, another is on the wire, and
a third travels up. Memory that the device can reach by itself (pinned) is taken once, and kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from recover.carriers.base import Array, Ready, wire_type
from recover.carriers.device_streams import CudaStream, Event, Stream
from recover.carriers.worker import Rest

PIECE = 8 << 20  # bytes
SLOTS = 4
ON_THE_WIRE = 2  # pieces, where the carrier can have several under way

Wait = Callable[[], object]


class _Slot:
    """Room for a piece, and the moments at which it is full and empty again."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.loaded: Event | None = None
        self.stored: Event | None = None

    def room(self, wire: torch.dtype, numbers: int) -> torch.Tensor:
        return self._memory.view(wire)[:numbers]


class Lanes:
    """The way down, the way up, and the slots between them. Used by one operation at a time."""

    def __init__(
        self,
        down: Stream,
        up: Stream,
        pinned: Callable[[int], torch.Tensor],
        piece: int = PIECE,
    ) -> None:
        self._down, self._up, self._pinned, self._piece = down, up, pinned, piece
        self._slots = self._make()
        self._spare: list[_Slot] | None = None

    def _make(self) -> list[_Slot]:
        return [_Slot(self._pinned(self._piece)) for _ in range(SLOTS)]

    def through(
        self, source: torch.Tensor, out: torch.Tensor, ready: Ready, begin: Callable[[Array], Wait | None]
    ) -> Rest:
        """Each piece of `source` goes through `begin` on the host, in place, and from there to `out`.

        `begin` returns what to wait for, if its result is not there yet. What is left in the end is the way up, which
        needs no wait of its own for `ready`: a piece goes up only after the host has seen it come down.
        """
        wire: torch.dtype = getattr(torch, wire_type(source))
        down, up = source.detach().view(-1), out.detach().view(-1)
        length = self._piece // wire.itemsize
        pieces = [slice(at, min(at + length, down.numel())) for at in range(0, down.numel(), length)]
        for event in ready.events:
            self._down.wait(event)
        on_the_wire: deque[tuple[int, torch.Tensor, Wait | None]] = deque()

        def load(number: int) -> None:
            slot, piece = self._slots[number % SLOTS], pieces[number]
            if slot.stored is not None:
                self._down.wait(slot.stored)
            self._down.copy(slot.room(wire, piece.stop - piece.start), down[piece])
            slot.loaded = self._down.record()

        def store() -> None:
            number, room, wait = on_the_wire.popleft()
            if wait is not None:
                wait()
            self._up.copy(up[pieces[number]], room)
            self._slots[number % SLOTS].stored = self._up.record()
            if number + SLOTS < len(pieces):
                load(number + SLOTS)

        try:
            for number in range(min(SLOTS, len(pieces))):
                load(number)
            for number, piece in enumerate(pieces):
                slot = self._slots[number % SLOTS]
                assert slot.loaded is not None
                slot.loaded.synchronize()
                room = slot.room(wire, piece.stop - piece.start)
                wait = begin(room.numpy())
                on_the_wire.append((number, room, wait))
                if wait is None or len(on_the_wire) == ON_THE_WIRE:
                    store()
            while on_the_wire:
                store()
        except Exception:
            # What went up must have arrived before somebody else writes there. And the library may still write to
            # slots that it gave up, until all have been through another agreement; so two sets take turns.
            self._up.record().synchronize()
            self._slots, self._spare = self._spare or self._make(), self._slots
            raise
        passed = self._up.record()
        return Rest(passed.synchronize, passed)


def cuda_lanes(device: Any) -> Lanes:
    def pinned(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    return Lanes(CudaStream(device), CudaStream(device), pinned)
