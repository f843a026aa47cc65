"""What this machine is, for whoever compares runs and figures."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """The name of the processor; its architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
