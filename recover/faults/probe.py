"""The one probe that kills. Code calls it at every named location; it fires where the schedule says so."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable

from recover.faults.locations import LOCATIONS, Kill

KILLS_VARIABLE = "RECOVER_KILL"  # a space-separated list, handed to every rank by whoever launches it


def _sigkill(kill: Kill) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal is on its way; nothing after this line may happen


class Probe:
    """What one rank is scheduled to suffer. `step` is set by whoever counts steps (from 1)."""

    def __init__(
        self,
        replica: int,
        local: int = 0,
        kills: Iterable[Kill] = (),
        fire: Callable[[Kill], None] = _sigkill,
    ) -> None:
        self._mine = [kill for kill in kills if (kill.replica, kill.local) == (replica, local)]
        self._fire = fire
        self.step = 0

    def __call__(self, location: str, detail: object = None) -> None:
        """Die here if this is the place. A kill without detail fires at the first arrival at its location."""
        if not self._mine:
            return
        for kill in self._mine:
            if self._matches(kill, location, detail):
                self._fire(kill)

    def expects(self, location: str, detail: object = None) -> bool:
        """Whether a call with these arguments would kill: lets the caller arrange what must be in flight."""
        return any(self._matches(kill, location, detail) for kill in self._mine)

    def _matches(self, kill: Kill, location: str, detail: object) -> bool:
        assert location in LOCATIONS, location
        return (
            kill.step == self.step
            and kill.location == location
            and (kill.detail is None or kill.detail == str(detail))
        )
