"""Bad links, in user space: frames between two TAP devices with delay, loss and limited bandwidth.

The kernel's own (`tc netem`) is missing in many kernels; this works in all, the same everywhere. One process serves all
cables of a lab, and holds the network namespace of its switch. Run as a plain file with the standard library only; each
line of stdin sets one cable, and is answered:

    {"taps": ["h1.near", "h1.far"], "out": {"delay": 0.2, "loss": 0.1, "rate": 0}, "in": {...}}
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from dataclasses import dataclass

_SET_NAME, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002  # TUNSETIFF; IFF_TAP | IFF_NO_PI
_LARGEST = 65536
_AT_ONCE = 64  # frames read from one device before the next
_BACKLOG = 0.2  # seconds that a frame may wait for bandwidth; later frames are dropped, as by a full switch
_IN_FLIGHT = 50_000  # frames: a bound on memory, not part of the model


@dataclass
class OneWay:
    """One direction: into this device, from the other end of the link."""

    target: int
    delay: float = 0.0
    loss: float = 0.0
    rate: float = 0.0  # bytes a second; 0: no limit
    free: float = 0.0  # time at which the last frame will have been sent

    def due(self, size: int, now: float) -> float | None:
        """Time of arrival of a frame; None if it is lost."""
        if random.random() < self.loss or self.free - now > _BACKLOG:
            return None
        if self.rate:
            self.free = max(self.free, now) + size / self.rate
        return max(self.free, now) + self.delay


class Wires:
    def __init__(self) -> None:
        self.taps: dict[str, int] = {}
        self.ways: dict[int, OneWay] = {}  # by the device that a frame is read from
        self.poll = select.poll()
        self.flying: list[tuple[float, int, int, bytes]] = []
        self.number = 0

    def set(self, taps: tuple[str, str], **ways: dict[str, float]) -> None:
        near, far = (self._tap(name) for name in taps)
        self.ways[near] = OneWay(far, **ways["out"])
        self.ways[far] = OneWay(near, **ways["in"])

    def _tap(self, name: str) -> int:
        if name not in self.taps:
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(fd, _SET_NAME, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
            self.taps[name] = fd
            self.poll.register(fd, select.POLLIN)
        return self.taps[name]

    def read(self, tap: int) -> None:
        way = self.ways[tap]
        for _ in range(_AT_ONCE):
            try:
                frame = os.read(tap, _LARGEST)
            except OSError:
                return  # no more, or the device is down
            due = way.due(len(frame), time.monotonic())
            if due is not None and len(self.flying) < _IN_FLIGHT:
                self.number += 1
                heapq.heappush(self.flying, (due, self.number, way.target, frame))

    def deliver(self) -> float | None:
        """Deliver frames that are due; returns seconds until the next one, or None."""
        while self.flying:
            wait = self.flying[0][0] - time.monotonic()
            if wait > 0:
                return wait
            _, _, target, frame = heapq.heappop(self.flying)
            try:
                os.write(target, frame)
            except OSError:
                pass  # the device is down or full: the frame is lost
        return None


def main(owner: int) -> None:
    for family in ("all", "default"):  # a switch has no addresses, and sends nothing itself
        if os.path.exists(setting := f"/proc/sys/net/ipv6/conf/{family}/disable_ipv6"):
            with open(setting, "w") as file:
                file.write("1")
    wires = Wires()
    for fd in (0, owner):
        wires.poll.register(fd, select.POLLIN)
    os.write(1, b"up\n")
    while True:
        wait = wires.deliver()
        for fd, _ in wires.poll.poll(None if wait is None else wait * 1000):
            if fd == owner:
                return
            if fd != 0:
                wires.read(fd)
            elif line := sys.stdin.readline():
                wires.set(**json.loads(line))
                os.write(1, b"set\n")
            else:
                return


if __name__ == "__main__":
    main(int(sys.argv[1]))
