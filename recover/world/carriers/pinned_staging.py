"""Pinned staging: data of a device travel through the host in pieces.

While one piece is copied down, another is on the wire, and a third is copied up. The pinned memory
is allocated once, and kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from recover.world.carriers.base import Array, wire_type
from recover.world.carriers.contract import CarrierError
from recover.world.carriers.device_streams import CudaStream, Event, Stream
from recover.world.carriers.worker import Completion

PIECE = 8 << 20  # bytes
SLOTS = 4
ON_THE_WIRE = 2  # pieces at a time, where the carrier can have several under way

Wait = Callable[[], object]


class _Slot:
    """Pinned memory for a piece, and the events at which it is loaded, and stored again."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.loaded: Event | None = None
        self.stored: Event | None = None

    def room(self, wire: torch.dtype, numbers: int) -> torch.Tensor:
        return self._memory.view(wire)[:numbers]


class _OnTheWire:
    """A piece whose operation was begun.

    The first thread that finds it complete copies it up, once.
    """

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
                # This object may stay on the list until the next operation, and must keep no memory
                # until then.
                del self._target, self._room
                self._wait = None
            return self._gone_up


class PinnedStaging:
    """A stream down, a stream up, and the slots between them.

    One operation at a time is begun. The last pieces of the one before may still be on the wire.

    Order within a slot: the copy down waits for the copy up of the slot's last piece (`stored`),
    the wire waits for the copy down (`loaded`), and the copy up waits for the wire.
    """

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
        self._on_the_wire: deque[_OnTheWire] = deque()  # begun, and not yet copied up by this thread
        self._group: object = None  # the carrier that uses the slots
        self._failed = False  # an operation of that carrier has failed

    def _make(self) -> deque[_Slot]:
        return deque(_Slot(self._pinned(self._piece)) for _ in range(SLOTS))

    def through(
        self,
        source: torch.Tensor,
        out: torch.Tensor,
        begin: Callable[[Array], Wait | None],
        group: object,
    ) -> Completion:
        """Pass each piece of `source` through `begin` on the host, in place, and copy it to `out`.

        `begin` returns a wait if its result is not complete yet. `group` identifies the carrier.
        The completion waits for the last pieces on the wire and the copies up.
        """
        wire: torch.dtype = getattr(torch, wire_type(source))
        down, up = source.detach().view(-1), out.detach().view(-1)
        length = self._piece // wire.itemsize
        pieces = deque(slice(at, min(at + length, down.numel())) for at in range(0, down.numel(), length))
        self._take_turns(group)
        slots, on_the_wire = self._slots, self._on_the_wire
        loaded: deque[tuple[_Slot, slice]] = deque()

        def load() -> None:
            """Copy pieces into free slots.

            The slots of pieces on the wire are the last ones of `slots`.
            """
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
            return Completion(lambda: self._end(last))
        passed = self._up.record()
        return Completion(passed.synchronize, passed)

    def _end(self, last: _OnTheWire) -> None:
        """Complete an operation whose last piece is on the wire.

        The next operation may have begun meanwhile.
        """
        try:
            last.store(self._up).synchronize()
        except Exception:
            self._fail()
            raise

    def _fail(self) -> None:
        """Wait for the copies up: they must be complete before the caller writes to the same memory again."""
        self._up.record().synchronize()
        self._failed = True

    def _take_turns(self, group: object) -> None:
        """Give the slots to `group`.

        The library may still write to the slots of a carrier that has failed, until all members
        have been through another agreement. So the next carrier gets other slots, and these are
        reused only by the one after it.
        """
        if group is self._group and self._failed:
            raise CarrierError("an earlier operation of this group has failed")
        if self._failed:
            self._slots, self._spare, self._failed = self._spare or self._make(), self._slots, False
            self._on_the_wire = deque()
        self._group = group


def cuda_staging(device: Any) -> PinnedStaging:
    def pinned(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    return PinnedStaging(CudaStream(device), CudaStream(device), pinned)
