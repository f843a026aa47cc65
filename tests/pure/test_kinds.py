"""A test that starts no process cannot start one by mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run([sys.executable, "-c", ""], check=True),
        lambda: os.system("true"),
        lambda: os._exit(0) if os.fork() == 0 else None,
    ],
    ids=["subprocess", "system", "fork"],
)
def test_a_pure_test_that_starts_a_process_is_refused(start: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="belongs into tests/processes"):
        start()


def test_matplotlib_may_look_for_fonts() -> None:
    sys.audit("subprocess.Popen", "fc-list", ["fc-list", "--help"], None, None)
