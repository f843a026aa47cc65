"""The one probe that makes faults happen. Code calls it at every named location; it fires where the schedule says."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from recover.faults.fault import Fault
from recover.faults.locations import LOCATIONS

Handler = Callable[[object], None]  # gets the detail of the place that was reached


class ScheduledFault(RuntimeError):
    """The exception of the action `exit`: it stands for a lost machine, wherever it strikes."""

    is_scheduled = True


class Probe:
    """What one rank is scheduled to suffer. `step` is set by whoever counts steps (from 1).

    What happens to weights and gradients is done by handlers: the probe knows nothing of tensors.
    """

    def __init__(
        self,
        replica: int,
        local: int = 0,
        faults: Iterable[Fault] = (),
        fire: Callable[[Fault], None] | None = None,
    ) -> None:
        faults = tuple(faults)
        self._samples = [
            fault for fault in faults if fault.kind == "sample"
        ]  # they strike whoever is given them
        self._mine = [
            fault
            for fault in faults
            if (fault.replica, fault.local) == (replica, local) and fault.kind != "sample"
        ]
        self._fire = fire
        self._handlers: dict[str, Handler] = {}
        self._step = 0
        self.slowness = 1.0  # how many times longer than it took should a microbatch take

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, number: int) -> None:
        if not self._step and number:
            self._start_clocks()
        self._step = number

    def handle(self, action: str, handler: Handler) -> None:
        """Let `handler` do what this action says."""
        self._handlers[action] = handler

    def __call__(self, location: str, detail: object = None) -> None:
        """Suffer what is scheduled here. A fault without detail fires at the first arrival at its location."""
        if not self._mine:
            return
        for fault in [fault for fault in self._mine if self._matches(fault, location, detail)]:
            self._mine.remove(fault)  # once: a location may be reached again in the same step
            self._suffer(fault, detail)

    def expects(self, location: str, detail: object = None) -> bool:
        """Whether a call with these arguments would fire: lets the caller arrange what must be in flight."""
        return any(self._matches(fault, location, detail) for fault in self._mine)

    def slow_slots(self, dealt: Mapping[int, Iterable[int]]) -> dict[int, float]:
        """The slots of this step whose samples are slow, and by how much. `dealt`: the first layout."""
        slow = {}
        for fault in self._samples:
            for slot in list(dealt.get(fault.replica, ()))[:1] if fault.step == self.step else ():
                slow[slot] = fault.amount
        return slow

    def _matches(self, fault: Fault, location: str, detail: object) -> bool:
        assert location in LOCATIONS, location
        return (
            fault.step == self.step
            and fault.location == location
            and (fault.detail is None or fault.detail == str(detail))
        )

    def _start_clocks(self) -> None:
        for fault in self._mine:
            if fault.after is not None:
                clock = threading.Timer(fault.after, self._suffer, (fault, None))
                clock.daemon = True
                clock.start()

    def _suffer(self, fault: Fault, detail: object) -> None:
        if self._fire is not None:
            self._fire(fault)
        elif fault.action == "kill":
            _signal_self(signal.SIGKILL)
        elif fault.action == "stop":
            _signal_self(signal.SIGSTOP)
        elif fault.action == "exit":
            raise ScheduledFault(f"scheduled: {fault}")
        elif fault.kind == "pause":
            _pause(fault.amount)
        elif fault.kind == "stall":
            time.sleep(fault.amount)
        elif fault.kind == "hold":
            _hold(fault.amount)
        elif fault.kind == "slow":
            self.slowness = fault.amount
        elif fault.action in self._handlers:
            self._handlers[fault.action](detail)
        else:
            raise RuntimeError(f"fault {fault}: only a loop on recover.Step can suffer {fault.action!r}")


def _signal_self(number: int) -> None:
    os.kill(os.getpid(), number)
    if number == signal.SIGKILL:
        time.sleep(60)  # the signal is on its way; nothing after this line may happen


def _hold(seconds: float) -> None:
    """As a long call of an extension that does not give the lock back."""
    until, library = time.monotonic() + seconds, ctypes.PyDLL(None)  # unlike CDLL it keeps the lock
    while (left := until - time.monotonic()) > 0:
        library.usleep(int(left * 1e6))  # a signal may end it early


def _pause(seconds: float) -> None:
    """A stopped process cannot wake itself: a child of it does."""
    me = os.getpid()
    asleep = f"until grep -q '^State:.T' /proc/{me}/status; do sleep 0.01; done"
    waker = subprocess.Popen(["sh", "-c", f"{asleep}; sleep {seconds}; kill -CONT {me}"])
    _signal_self(signal.SIGSTOP)
    waker.wait()
