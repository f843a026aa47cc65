"""What a script does to its environment before it knows the world, for those who import torch ahead
of it.

The ranks that begin leave it in the session of their host: torch reads some of it (the number of
threads, say) once, when it is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

CHANGES = "environment.json"  # in the session: by name; null for what was taken away


def leave_changes(session: Path, given: Mapping[str, str]) -> None:
    """`given`: the environment in which the script began."""
    changes = {name: os.environ.get(name) for name in given.keys() | os.environ.keys()}
    changes = {name: value for name, value in changes.items() if value != given.get(name)}
    written = session / f"{CHANGES}.{os.getpid()}"
    written.write_text(json.dumps(changes))
    written.rename(session / CHANGES)


def changed(environment: Mapping[str, str], session: Path) -> dict[str, str] | None:
    """This environment, as the script changes it; None as long as nobody has said how."""
    try:
        changes = json.loads((session / CHANGES).read_text())
    except FileNotFoundError:
        return None
    return {name: value for name, value in {**environment, **changes}.items() if value is not None}
