"""Faults that a process cannot execute itself, such as the loss of its host's power: the lab
executes them.

The rank that reaches the location requests it by a file in a directory that all hosts see, and
waits until it is done.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from recover.faults.fault import Fault, parse_fault

VARIABLE = "RECOVER_LAB"  # names the directory
PATIENCE = 60.0  # seconds
_AGAIN = 0.002  # seconds between two polls
_DONE = ".done"


def have_done(fault: Fault) -> None:
    """Request a fault and wait until it is done, if this process survives it."""
    asked = Path(os.environ[VARIABLE], str(fault))
    asked.touch()
    deadline = time.monotonic() + PATIENCE
    while not asked.with_name(asked.name + _DONE).exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"fault {fault}: no lab has done it within {PATIENCE:g} s; is it still there?")
        time.sleep(_AGAIN)


def asked_for(place: Path) -> list[Fault]:
    """The faults that ranks wait for."""
    names = set(os.listdir(place))
    return [
        parse_fault(name) for name in sorted(names) if not name.endswith(_DONE) and name + _DONE not in names
    ]


def is_done(place: Path, fault: Fault) -> None:
    """Let the rank that waits for this fault continue."""
    (place / (str(fault) + _DONE)).touch()
