"""The probe: code calls it at every named location, and it executes the faults of the schedule."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from recover.faults import lab_requests
from recover.faults.fault import IN_GRADIENT, IN_RESULT, OF_DEVICE, Fault
from recover.faults.locations import IN_FLIGHT, LOCATIONS

Handler = Callable[[Fault, object], None]  # takes the detail of the location


class ScheduledFault(RuntimeError):
    """The exception of the action `exit`. It stands for a lost machine, wherever it is raised."""

    is_scheduled = True


class Probe:
    """The scheduled faults of one rank. `step` is set by the step loop, from 1."""

    def __init__(
        self,
        replica: int,
        local: int = 0,
        faults: Iterable[Fault] = (),
        fire: Callable[[Fault], None] | None = None,
    ) -> None:
        faults = tuple(faults)
        # A slow sample strikes every rank that computes it.
        self._samples = [fault for fault in faults if fault.kind == "sample"]
        self._mine = [
            fault
            for fault in faults
            if (fault.replica, fault.local) == (replica, local) and fault.kind != "sample"
        ]
        self._fire = fire
        self._handlers: dict[str, Handler] = {}
        self.coming: Callable[[], Collection[int]] = lambda: ()
        self.came: Collection[int] = ()
        self._step = 0
        self._slowness = 1.0  # factor on the duration of every microbatch
        # Slots of this step whose samples are slow, with their seconds.
        self._slow: dict[int, float] = {}

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, number: int) -> None:
        if not self._step and number:
            self._start_clocks()
        self._step = number

    def watch(self, model: Any, gradients: Any) -> None:
        """Pass the tensors that faults may damage."""
        if any(
            fault.kind in (*IN_GRADIENT, *IN_RESULT, *OF_DEVICE, "corrupt:weights") for fault in self._mine
        ):
            from recover.faults.damage import damages  # needs torch, which other faults do not

            self._handlers = damages(model, gradients, self._mine)

    def __call__(self, location: str, detail: object = None) -> None:
        """Execute the faults of this location.

        A fault without detail fires at the first arrival.
        """
        if not self._mine:
            return
        for fault in [fault for fault in self._mine if self._matches(fault, location, detail)]:
            self._mine.remove(fault)  # once: a location may be reached again in the same step
            self._suffer(fault, detail)

    def under_way(self, location: str, work: Any = None, detail: object = None) -> None:
        """Execute the faults a moment after an operation has begun: after `work` has, if it is
        given."""
        if any(self._matches(fault, location, detail) for fault in self._mine):
            if work is not None:
                work.started.wait()
            time.sleep(IN_FLIGHT)
            self(location, detail)

    def beside(self, location: str) -> None:
        """Execute the faults a moment later, on another thread: this rank is about to wait here
        without a limit."""
        if any(self._matches(fault, location, None) for fault in self._mine):
            clock = threading.Timer(IN_FLIGHT, self, (location,))
            clock.daemon = True
            clock.start()

    def dealt(self, slots: Mapping[int, Iterable[int]]) -> None:
        """A step begins, with these slots for each replica.

        A slow sample is the first one of its replica.
        """
        self._slow = {
            slot: fault.amount
            for fault in self._samples
            if fault.step == self.step
            for slot in list(slots.get(fault.replica, ()))[:1]
        }

    def reading(self, slot: int) -> None:
        """Delay the reader of a slow sample."""
        if slot in self._slow:
            time.sleep(self._slow[slot])

    def computed(self, took: Callable[[], float]) -> None:
        if self._slowness > 1:
            time.sleep((self._slowness - 1) * took())

    def _matches(self, fault: Fault, location: str, detail: object) -> bool:
        assert location in LOCATIONS, location
        return (
            fault.location == location
            and (fault.detail is None or fault.detail == str(detail))
            and self._is_time(fault)
        )

    def _is_time(self, fault: Fault) -> bool:
        if fault.asks is not None:
            return fault.asks in self.coming()
        return fault.joined in self.came if fault.joined is not None else fault.step == self.step

    def _start_clocks(self) -> None:
        for fault in self._mine:
            if fault.after is not None:
                clock = threading.Timer(fault.after, self._suffer, (fault, None))
                clock.daemon = True
                clock.start()

    def _suffer(self, fault: Fault, detail: object) -> None:
        if self._fire is not None:
            self._fire(fault)
        elif fault.needs_lab:
            lab_requests.have_done(fault)
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
            self._slowness = fault.amount
        elif fault.kind in self._handlers:
            self._handlers[fault.kind](fault, detail)
        else:
            raise RuntimeError(f"fault {fault}: only a loop on recover.Step can suffer {fault.action!r}")


def _signal_self(number: int) -> None:
    os.kill(os.getpid(), number)
    if number == signal.SIGKILL:
        time.sleep(60)  # the signal is under way, and nothing after this line may run


def _hold(seconds: float) -> None:
    """Hold Python's lock, as a long call of an extension does."""
    until, library = time.monotonic() + seconds, ctypes.PyDLL(None)  # unlike CDLL it keeps the lock
    while (left := until - time.monotonic()) > 0:
        library.usleep(int(left * 1e6))  # a signal may end it early


def _pause(seconds: float) -> None:
    """Stop this process; a child of it sends SIGCONT later."""
    me = os.getpid()
    asleep = f"until grep -q '^State:.T' /proc/{me}/status; do sleep 0.01; done"
    waker = subprocess.Popen(["sh", "-c", f"{asleep}; sleep {seconds}; kill -CONT {me}"])
    _signal_self(signal.SIGSTOP)
    waker.wait()
