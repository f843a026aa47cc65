"""From a device through the host's wire and back, in pieces: while one piece travels down, another is on the wire, and
a third travels up. Memory that the device can reach by itself (pinned) is taken once, and kept."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from recover.world.carriers.base import Array, wire_type
from recover.world.carriers.contract import CarrierError
from recover.world.carriers.device_streams import CudaStream, Event, Stream
from recover.world.carriers.worker import Rest

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


class _OnTheWire:
    """A piece that was begun: it goes up once, whoever comes first to see that it is through."""

    def __init__(self, slot: _Slot, room: torch.Tensor, target: torch.Tensor, wait: Wait | None) -> None:
        self._slot, self._room, self._target, self._wait = slot, room, target, wait
        self._lock = threading.Lock()
        self._gone_up: Event | None = None

    def store(self, up: Stream) -> Event:
        if wait := self._wait:
            wait()
        with self._lock:
            if self._gone_up is None:
                up.copy(self._target, self._room)
                self._slot.stored = self._gone_up = up.record()
                # It may stay on the list until the next operation, and must keep no memory until then.
                del self._target, self._room
                self._wait = None
            return self._gone_up


class Lanes:
    """The way down, the way up, and the slots between them. One operation at a time is begun; the last pieces of the
    one before it may still be on the wire, which would have nothing to do otherwise."""

    def __init__(
        self,
        down: Stream,
        up: Stream,
        pinned: Callable[[int], torch.Tensor],
        piece: int = PIECE,
    ) -> None:
        self._down, self._up, self._pinned, self._piece = down, up, pinned, piece
        self._slots = self._make()
        self._spare: deque[_Slot] | None = None
        self._on_the_wire: deque[_OnTheWire] = deque()  # begun, and not seen to be through by who begins them
        self._group: object = None  # whose operations these are
        self._failed = False  # one of them

    def _make(self) -> deque[_Slot]:
        return deque(_Slot(self._pinned(self._piece)) for _ in range(SLOTS))

    def through(
        self,
        source: torch.Tensor,
        out: torch.Tensor,
        begin: Callable[[Array], Wait | None],
        group: object,
    ) -> Rest:
        """Each piece of `source` goes through `begin` on the host, in place, and from there to `out`. `group`: of whom.

        `begin` returns what to wait for, if its result is not there yet. What is left in the end is the way up and, of
        those that are waited for, the last pieces on the wire.
        """
        wire: torch.dtype = getattr(torch, wire_type(source))
        down, up = source.detach().view(-1), out.detach().view(-1)
        length = self._piece // wire.itemsize
        pieces = deque(slice(at, min(at + length, down.numel())) for at in range(0, down.numel(), length))
        self._take_turns(group)
        slots, on_the_wire = self._slots, self._on_the_wire
        loaded: deque[tuple[_Slot, slice]] = deque()

        def load() -> None:
            """Into the slots that nothing is in: those of pieces on the wire are the last ones of `slots`."""
            while pieces and len(loaded) + len(on_the_wire) < SLOTS:
                piece, slot = pieces.popleft(), slots[0]
                slots.rotate(-1)
                if slot.stored is not None:
                    self._down.wait(slot.stored)
                self._down.copy(slot.room(wire, piece.stop - piece.start), down[piece])
                slot.loaded = self._down.record()
                loaded.append((slot, piece))

        try:
            load()
            while loaded:
                slot, piece = loaded.popleft()
                assert slot.loaded is not None
                slot.loaded.synchronize()
                room = slot.room(wire, piece.stop - piece.start)
                wait = begin(room.numpy())
                on_the_wire.append(_OnTheWire(slot, room, up[piece], wait))
                while len(on_the_wire) > (0 if wait is None else ON_THE_WIRE - 1):
                    on_the_wire[0].store(self._up)
                    on_the_wire.popleft()
                load()
        except Exception:
            self._fail()
            raise
        if down.numel() and on_the_wire:
            last = on_the_wire[-1]
            return Rest(lambda: self._end(last))
        passed = self._up.record()
        return Rest(passed.synchronize, passed)

    def _end(self, last: _OnTheWire) -> None:
        """Of an operation whose last piece is on the wire still; another one may have been begun meanwhile."""
        try:
            last.store(self._up).synchronize()
        except Exception:
            self._fail()
            raise

    def _fail(self) -> None:
        """What went up must have arrived before somebody else writes there."""
        self._up.record().synchronize()
        self._failed = True

    def _take_turns(self, group: object) -> None:
        """A library may still write to slots of a group that has failed, until all have been through another agreement;
        so they rest while the next group is at work. Which of them are free nobody knows, so it uses them no more."""
        if group is self._group and self._failed:
            raise CarrierError("an operation of this group has failed before")
        if self._failed:
            self._slots, self._spare, self._failed = self._spare or self._make(), self._slots, False
            self._on_the_wire = deque()
        self._group = group


def cuda_lanes(device: Any) -> Lanes:
    def pinned(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    return Lanes(CudaStream(device), CudaStream(device), pinned)
