"""How tests wait: for an event, and no longer than a hang guard that a busy machine never reaches.

No test asserts how long something took, and none sleeps until something has probably happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 180.0  # seconds; many times what anything takes on two cores with other load


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    """Whether it came true. `seconds`: given only by a test of what must not happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
