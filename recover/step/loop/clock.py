"""How long a microbatch takes, by the clock of what computes it."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from recover.gradients.deferred import DeviceValue


class Clock(Protocol):
    def start(self) -> None: ...

    def took(self) -> float | DeviceValue[float]:
        """Seconds from the start to here."""

    def forget(self) -> None:
        """All that it has told later is known by now, or of no account."""


class HostClock:
    def __init__(self) -> None:
        self._since = 0.0

    def start(self) -> None:
        self._since = time.perf_counter()

    def took(self) -> float:
        return time.perf_counter() - self._since

    def forget(self) -> None:
        pass


class DeviceClock:
    """The host is through with a microbatch when it has told the device of it: only the device knows when it is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []  # to make one takes longer than to use it
        self._used = 0
        self._since = self._next()

    def start(self) -> None:
        self._since = self._mark()

    def took(self) -> DeviceValue[float]:
        since, until = self._since, self._mark()

        def seconds() -> float:
            until.synchronize()
            return float(since.elapsed_time(until)) / 1e3

        return DeviceValue(seconds)

    def forget(self) -> None:
        self._used = 0

    def _mark(self) -> torch.cuda.Event:
        event = self._next()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _next(self) -> torch.cuda.Event:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._used += 1
        return self._events[self._used - 1]


def clock_of(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()
