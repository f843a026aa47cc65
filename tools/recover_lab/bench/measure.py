"""What all benchmarks share: a run directory to launch into, medians with spread, the machine, tables and JSON."""

from __future__ import annotations

import json
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
from recover_lab.peers.ended import BenchmarkError, check
from recover_lab.publish.measured_sources import LAB, sources

PROGRAMS = Path(__file__).parent / "programs"
WIDE = 132  # columns of a table where no terminal sets a limit

_origin: dict[str, Any] | None = None  # of the benchmark that is being run


@contextmanager
def launched(
    program: str | Path,
    ranks: int,
    arguments: Sequence[str],
    timeout: float = 120,
    replica_size: int = 1,
    carrier: str = "auto",
) -> Iterator[Path]:
    """Run a program of this package under the launcher; its run directory, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="recover-bench-") as directory:
        run_dir = Path(directory)
        request = LaunchRequest(
            PROGRAMS / program, list(arguments), replica_size, run_dir, timeout, carrier=carrier
        )
        code = launch(ranks, request)
        check(code, f"{Path(program).name} on {ranks} ranks ended with code {code}")
        yield run_dir


def tidy_on_sigterm() -> None:
    """A SIGTERM ends us as Ctrl-C does: what was started is ended, and scratch files go."""
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def screen() -> Console:
    """Where tables go: as wide as the terminal, and wide enough in a file."""
    return Console(width=None if sys.stdout.isatty() else WIDE)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and the middle half of the measurements."""
    quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": statistics.median(values), "low": quarters[0], "high": quarters[2], "n": len(values)}


def begin(output: Path | None) -> Console:
    """The first line of every benchmark: all that can fail but the measuring itself, while nothing is lost by it.

    Refuses an `output` that cannot be written, and learns where the figures come from. Returns the screen.
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
            raise BenchmarkError(f"the figures cannot be written to {output}: {error.strerror}") from None
    _origin = origin()
    return screen()


def place() -> str:
    """One line under every table."""
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
    """By which program, where and when."""
    here = machine()
    git = ["git", "-C", str(LAB), "rev-parse", "--short=12", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = ""  # installed without its history
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "command": shlex.join(["recover", *sys.argv[1:]]),
        "machine": here,
        "commit": commit,
        "sources": sources(),
        "measured_at": when,
    }
