"""Skips a test that this machine cannot run, with the reason; never if the machine is known to have what it needs.

`TESTS_MUST_HAVE` names what is there, of `browser`, `hosts`, `memory`, `mounts`, `slurm`: CI finds that out by other
means than the tests do (`.ci/run`). So a test that wrongly finds something missing fails there.
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def leave_out(need: str, reason: str) -> NoReturn:
    if need in os.environ.get("TESTS_MUST_HAVE", "").split():
        pytest.fail(f"this machine has what the test needs ({need}), and yet: {reason}")
    pytest.skip(f"needs {need}: {reason}")
