"""`--on-incident CMD`: runs a command after every loss, with the facts on its stdin. Training never waits for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from recover.runs.live.view import RunView

_LOOK = 0.5  # seconds between two reads of the records
_LIMIT = 60.0  # seconds that a command may take before it is killed
_CLOSING = 5.0  # seconds that a command has left when the job has ended
_KNOWN = 1.0  # seconds to wait for the launcher to record the cause of a loss


class Alerts:
    """A thread that reads the records of a run and runs the command for each new loss, one at a time."""

    def __init__(self, run_dir: Path, command: str, say: Callable[[str], object]) -> None:
        self._view, self._command, self._say = RunView(run_dir), command, say
        self._told: set[int] = set()
        self._seen: dict[int, float] = {}
        self._stop = threading.Event()
        self._deadline = float("inf")
        self._complained = False
        self._thread = threading.Thread(target=self._loop, name="recover-alerts", daemon=True)

    def __enter__(self) -> Self:
        self._view.refresh()  # losses of the run before it was resumed raise no alert
        self._told |= {incident["number"] for incident in self._view.incidents()}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._deadline = time.monotonic() + _CLOSING
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        last = False
        while not last:
            last = self._stop.wait(_LOOK)
            self._view.refresh(at_once=True)
            for incident in self._view.incidents():
                number = incident["number"]
                if (
                    number in self._told
                    or not incident["dead_ranks"]
                    or (incident["step"] is None and not last)
                ):
                    continue  # the next step's incident may still name these ranks
                seen = self._seen.setdefault(number, time.monotonic())
                unknown = any(death["at"] is None for death in incident["first"])
                if unknown and not last and time.monotonic() - seen < _KNOWN:
                    continue
                self._told.add(number)
                self._run({"run": self._view.name, "run_dir": str(self._view.run_dir), **incident})

    def _run(self, incident: dict[str, Any]) -> None:
        try:
            process = subprocess.Popen(
                self._command,
                shell=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that its children are killed with it
            )
        except OSError as error:
            self._complain(str(error))
            return
        limit = max(0.1, min(_LIMIT, self._deadline - time.monotonic()))
        try:
            process.communicate(json.dumps(incident).encode() + b"\n", timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._complain(f"it was ended after {limit:.0f} s")
        else:
            if process.returncode:
                self._complain(f"exit code {process.returncode}")

    def _complain(self, why: str) -> None:
        if not self._complained:
            self._complained = True
            self._say(f"--on-incident: {self._command!r} failed ({why}); the run goes on")
