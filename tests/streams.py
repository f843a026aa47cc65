"""Streams without a device: their work happens late, in an order that only their events and waits constrain."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class LateDevice:
    """Runs the work of its streams as late as their order allows, or, with a seed, at random moments."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed) if seed is not None else None
        self._streams: list[LateStream] = []
        self.lock = threading.RLock()

    def stream(self) -> LateStream:
        stream = LateStream(self)
        self._streams.append(stream)
        return stream

    def pinned(self, size: int) -> torch.Tensor:
        return torch.full((size,), 0x55, dtype=torch.uint8)

    def happen(self) -> None:
        """With a seed: advance the streams at random, as a device may at any moment."""
        if self._random is not None:
            for stream in self._random.sample(self._streams, len(self._streams)):
                stream.advance(self._random.randrange(4))


class LateEvent:
    def __init__(self, stream: LateStream, at: int) -> None:
        self._stream, self._at = stream, at

    def synchronize(self) -> None:
        """Run only the work that this event waits for. A kernel that waits for others keeps the host waiting."""
        while not self._stream.advance_to(self._at):
            time.sleep(0.001)

    def reached(self) -> bool:
        return self._stream.advance_to(self._at)


class LateStream:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._asked: list[Callable[[], bool]] = []  # each returns whether it has happened
        self._done = 0
        self.handle = id(self)

    def wait(self, event: LateEvent) -> None:
        self._ask(event.reached)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        def happen() -> bool:
            target.copy_(source)
            return True

        self._ask(happen)

    def launch(self, kernel: Callable[[], bool]) -> None:
        """Enqueue a kernel that may take a while: it is called again and again until it returns True."""
        self._ask(kernel)

    def record(self) -> LateEvent:
        return LateEvent(self, len(self._asked))

    def holds(self, data: Any) -> bool:
        return bool(getattr(data, "on_late_device", False))

    def new(self, shape: Sequence[int], kind: str) -> torch.Tensor:
        return on_device(torch.empty(tuple(shape), dtype=getattr(torch, kind)))

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()

    def advance_to(self, end: int) -> bool:
        with self._device.lock:
            while self._done < end:
                if not self._asked[self._done]():
                    return False
                self._done += 1
            return True

    def advance(self, count: int) -> None:
        with self._device.lock:
            self.advance_to(min(self._done + count, len(self._asked)))

    def _ask(self, what: Callable[[], bool]) -> None:
        with self._device.lock:
            self._asked.append(what)
        self._device.happen()


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor as if it lay on the device."""
    tensor.on_late_device = True  # type: ignore[attr-defined]
    return tensor
