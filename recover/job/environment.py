"""Changes that a script makes to its environment before `recover.init()`, for prewarmed processes.

The first ranks write them to the session of their host. Torch reads some variables (the number of
threads) once, when it is imported, and a prewarmed process imports it before it runs the script.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

CHANGES = "environment.json"  # in the session: by name; null for a variable that was removed


def write_changes(session: Path, given: Mapping[str, str]) -> None:
    """Write the changes. `given`: the environment in which the script began."""
    changes = {name: os.environ.get(name) for name in given.keys() | os.environ.keys()}
    changes = {name: value for name, value in changes.items() if value != given.get(name)}
    written = session / f"{CHANGES}.{os.getpid()}"
    written.write_text(json.dumps(changes))
    written.rename(session / CHANGES)


def changed(environment: Mapping[str, str], session: Path) -> dict[str, str] | None:
    """This environment, as the script changes it; None if no rank has written the changes yet."""
    try:
        changes = json.loads((session / CHANGES).read_text())
    except FileNotFoundError:
        return None
    return {name: value for name, value in {**environment, **changes}.items() if value is not None}
