"""The processes of a job's ranks, found by their process names."""

from __future__ import annotations

import os
from pathlib import Path

from recover.job.process import rank_of


def ranks_of_run(run_dir: Path) -> dict[int, tuple[int, dict[str, str]]]:
    """By rank: the pid, and the environment that the process was started with."""
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if (rank := rank_of(pid)) is None:
            continue
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        told = dict(word.decode(errors="replace").partition("=")[::2] for word in words)
        if told.get("RECOVER_RUN_DIR") == str(run_dir):
            found[rank] = pid, told
    return found
