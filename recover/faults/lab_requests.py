"""Faults that no process can do to itself, as the loss of its host's power: the lab that the job runs on does them.

The rank that reaches the place asks, by a file in a directory that all hosts see, and waits there until it is done.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from recover.faults.fault import Fault, parse_fault

VARIABLE = "RECOVER_LAB"  # names the directory
PATIENCE = 60.0  # seconds
_AGAIN = 0.002  # seconds between two looks
_DONE = ".done"


def have_done(fault: Fault) -> None:
    """Ask for it; returns when it is done, if this process outlives it."""
    asked = Path(os.environ[VARIABLE], str(fault))
    asked.touch()
    deadline = time.monotonic() + PATIENCE
    while not asked.with_name(asked.name + _DONE).exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"fault {fault}: no lab has done it within {PATIENCE:g} s; is it still there?")
        time.sleep(_AGAIN)


def asked_for(place: Path) -> list[Fault]:
    """What ranks wait for."""
    names = set(os.listdir(place))
    return [
        parse_fault(name) for name in sorted(names) if not name.endswith(_DONE) and name + _DONE not in names
    ]


def is_done(place: Path, fault: Fault) -> None:
    """Whoever waits for it may go on."""
    (place / (str(fault) + _DONE)).touch()
