"""Passes a process's output on, stdout and stderr apart, in whole lines where there are any."""

from __future__ import annotations

import os
import selectors
import subprocess
import time


class Relay:
    """Reads a process's pipes; the caller pumps, and so learns whether anything was said."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._selector = selectors.DefaultSelector()
        self._held: dict[int, bytes] = {1: b"", 2: b""}
        assert process.stdout is not None
        assert process.stderr is not None
        for pipe, target in ((process.stdout, 1), (process.stderr, 2)):
            self._selector.register(pipe, selectors.EVENT_READ, (target, pipe))

    @property
    def open(self) -> bool:
        return bool(self._selector.get_map())

    def pump(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for output and pass it on; True if there was any."""
        ready = self._selector.select(timeout)
        for key, _ in ready:
            target, pipe = key.data
            data = os.read(key.fd, 1 << 16)
            self._pass_on(target, data)
            if not data:
                self._selector.unregister(pipe)
                pipe.close()
        if not ready:  # nobody has finished these lines for a while: a prompt, a progress bar
            self._flush()
        return bool(ready)

    def drain(self, limit: float) -> None:
        """Pass on what is left, until the pipes are closed or `limit` seconds are over."""
        deadline = time.monotonic() + limit
        while self.open and time.monotonic() < deadline:
            self.pump(0.05)
        self._flush()

    def _pass_on(self, target: int, data: bytes) -> None:
        whole, newline, rest = (self._held[target] + data).rpartition(b"\n")
        self._held[target] = rest
        _write(target, whole + newline)

    def _flush(self) -> None:
        for target, data in self._held.items():
            _write(target, data)
            self._held[target] = b""


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]
