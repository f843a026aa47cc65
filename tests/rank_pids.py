"""The processes of a job's ranks, by what they call themselves."""

from __future__ import annotations

import os
from pathlib import Path

NAME = "recover-rank-"


def rank_of(pid: int) -> int | None:
    """The rank that this process is; None if it is none, or gone."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
    return int(name.removeprefix(NAME)) if name.startswith(NAME) else None


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
