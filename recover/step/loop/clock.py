"""Seconds of a microbatch, measured by the host or by the device that computes it."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from recover.gradients.deferred import DeviceValue


class Clock(Protocol):
    def start(self) -> None: ...

    def took(self) -> float | DeviceValue[float]:
        """Seconds since `start`."""

    def forget(self) -> None:
        """Allow events to be used again: all values of `took` are read, or not needed."""


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
    """Measures by events on the stream: the host only queues a microbatch, and does not know when it was
    computed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []  # used again: creating one takes longer than recording it
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
