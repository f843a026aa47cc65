"""Processes that read data ahead: what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE


def test_stream_workers_leave_no_directory(tmp_path: Path) -> None:
    script, scratch = tmp_path / "script.py", tmp_path / "scratch"
    script.write_text(
        "import recover, torch\n"
        "stream = recover.stream([torch.full((1 << 18,), float(n)) for n in range(4)], workers=2)\n"
        "stream.expect(range(4), range(4))\n"
        "print(*(float(stream[n].max()) for n in range(4)))\n"  # large ones go through shared memory
    )
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    said = subprocess.run(
        [sys.executable, script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert said.stdout == "0.0 1.0 2.0 3.0\n"
    assert not list(scratch.iterdir())
