"""Runs all tests, for `make test`: those that start no process beside those that do, out of their way.

What the former have to say is printed when the latter are through. Options for both are in PYTEST_ADDOPTS.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

PROCESSES, BESIDE = "processes", "pure or simulated"
NONE_CHOSEN = 5  # pytest's exit code


def run(kind: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "pytest", "-m", kind], **options)  # type: ignore[call-overload, no-any-return]


def out_of_the_way() -> None:
    os.nice(19)
    os.setsid()
    try:  # Linux may share its cores among sessions first, and only then look at how nice a process is
        Path("/proc/self/autogroup").write_text("19")
    except OSError:
        pass


def stopped(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stopped)
    with tempfile.TemporaryFile() as said:
        first = run(PROCESSES)
        beside = run(BESIDE, stdout=said, stderr=subprocess.STDOUT, preexec_fn=out_of_the_way)
        try:
            codes = {PROCESSES: first.wait(), BESIDE: beside.wait()}
        finally:
            for each in (first, beside):
                if each.poll() is None:
                    each.send_signal(signal.SIGINT)  # pytest takes down what its tests have set up
            first.wait(), beside.wait()
        said.seek(0)
        sys.stdout.buffer.write(said.read())
    failed = {kind: code for kind, code in codes.items() if code not in (0, NONE_CHOSEN)}
    for kind, code in failed.items():
        print(f"FAILED: the tests that are {kind} (pytest's exit code {code})")
    return max(failed.values(), default=0 if 0 in codes.values() else NONE_CHOSEN)


if __name__ == "__main__":
    sys.exit(main())
