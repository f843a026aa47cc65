"""Shared by all benchmarks: launches, medians with spread, paired ratios, the machine, JSON files."""

from __future__ import annotations

import json
import math
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from recover.job.machine import machine
from recover.launch.launcher import launch
from recover.launch.request import LaunchRequest
from recover_lab.confidence import mean_interval
from recover_lab.locations import LAB
from recover_lab.peers.ended import BenchmarkError, check
from recover_lab.publish.measured_sources import sources

PROGRAMS = LAB / "bench" / "programs"
PEER_PROGRAMS = LAB / "peers" / "programs"
WIDE = 132  # columns of a table where no terminal sets a limit

_origin: dict[str, Any] | None = None  # of the running benchmark


@contextmanager
def launch_program(
    program: str | Path,
    ranks: int,
    arguments: Sequence[str],
    timeout: float = 120,
    replica_size: int = 1,
    carrier: str = "auto",
) -> Iterator[Path]:
    """Run a program of this package under the launcher; yields its run directory, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="recover-bench-") as directory:
        run_dir = Path(directory)
        request = LaunchRequest(
            PROGRAMS / program, list(arguments), replica_size, run_dir, timeout, carrier=carrier
        )
        code = launch(ranks, request)
        check(code, f"{Path(program).name} on {ranks} ranks ended with code {code}")
        yield run_dir


def exit_on_sigterm() -> None:
    """Let SIGTERM end the process as Ctrl-C does: started processes are ended, and scratch files removed."""
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def make_console() -> Console:
    """A console for tables: as wide as the terminal, or `WIDE` columns in a file."""
    return Console(width=None if sys.stdout.isatty() else WIDE)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and the middle half of the measurements."""
    quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": statistics.median(values), "low": quarters[0], "high": quarters[2], "n": len(values)}


def paired_ratio(reference: list[float], ours: list[float]) -> tuple[float, float, float]:
    """How many times faster ours is: geometric mean over the turns, and its 95% interval (Student's t)."""
    logs = [math.log(theirs / mine) for theirs, mine in zip(reference, ours, strict=True)]
    mean, low, high = mean_interval(logs)
    return math.exp(mean), math.exp(low), math.exp(high)


def begin(output: Path | None) -> Console:
    """Called first by every benchmark: everything but measuring that can fail, before time is spent.

    Raises BenchmarkError for an `output` that cannot be written, and reads machine and commit. Returns the console.
    """
    global _origin
    if output is not None:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            with output.open("a"):
                pass
            if not output.stat().st_size:
                output.unlink()
        except OSError as error:
            raise BenchmarkError(f"the results cannot be written to {output}: {error.strerror}") from None
    _origin = origin()
    return make_console()


def machine_line() -> str:
    """The line under every table."""
    here = _begun()["machine"]
    return (
        f"measured on {here['cores']} cores ({here['processor']}, {here['architecture']}), torch {here['torch']}, "
        f"Open MPI {here['openmpi']}"
    )


def write(path: Path | None, results: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps({**_begun(), **results}, indent=2) + "\n")


def _begun() -> dict[str, Any]:
    assert _origin is not None, "a benchmark calls begin() before it measures"
    return _origin


def origin() -> dict[str, Any]:
    """Command, machine, commit and time of a measurement."""
    here = machine()
    git = ["git", "-C", str(LAB), "rev-parse", "--short=12", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = ""  # not a checkout
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "command": shlex.join(["recover", *sys.argv[1:]]),
        "machine": here,
        "commit": commit,
        "sources": sources(),
        "measured_at": when,
    }
