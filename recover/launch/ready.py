"""A process that has imported what every rank needs, and waits to be told which one it is.

Run as `python -P -m recover.launch.ready`, with the arguments of `recover.launch.bootstrap`, whose work it does then:
most of the time that a rank needs to start goes into imports. It imports them in the environment that the script made
for itself in those who began (torch reads some of it when it is imported), but runs the script in its launcher's.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from recover.job import process
from recover.launch import bootstrap

# `torch._dynamo`: every optimizer of torch's imports it when it is made.
IMPORTED = ("torch", "torch._dynamo", "recover.step.step", "recover.launch.join", "recover.etcd.etcd_fabric")
CHANGED = "environment.json"  # in the session: what the script has changed, by name; null if it took it away


def main() -> None:
    bootstrap.die_with_parent()
    own = [sys.argv[2]] if sys.argv[1] == "-m" and sys.argv[2].startswith("recover.") else []
    for name in (*IMPORTED, *own):
        try:
            importlib.import_module(name)
        except Exception:
            pass  # the rank will say so, if it needs it
    told = sys.stdin.buffer.readline()
    if not told:
        return  # nobody needs it
    process.waited_until = time.clock_gettime(time.CLOCK_BOOTTIME)
    os.environ.clear()
    os.environ.update(json.loads(told))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    bootstrap.main()


def leave_changes(session: Path, given: Mapping[str, str]) -> None:
    """By the ranks that begin, when they know the world; `given`: the environment in which the script began."""
    changes = {name: os.environ.get(name) for name in given.keys() | os.environ.keys()}
    changes = {name: value for name, value in changes.items() if value != given.get(name)}
    written = session / f"{CHANGED}.{os.getpid()}"
    written.write_text(json.dumps(changes))
    written.rename(session / CHANGED)


def changed(environment: Mapping[str, str], session: Path) -> dict[str, str] | None:
    """This environment, as the script changes it; None as long as nobody has said how."""
    try:
        changes = json.loads((session / CHANGED).read_text())
    except FileNotFoundError:
        return None
    return {name: value for name, value in {**environment, **changes}.items() if value is not None}


if __name__ == "__main__":
    main()
