"""The report that the ranks of a job compute, and have made no `recover.Step`: no death of theirs
would be repaired."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from recover.world.liveness.board import ScriptStage

if TYPE_CHECKING:
    from recover.world.liveness.board import Board

# CPU time of each rank, not time of the clock: imports take several times as long on a busy machine.
PATIENCE = 20.0


class MissingStep:
    """Finds jobs that run a user's script and make no `recover.Step`. Reports once."""

    def __init__(self, cpu_seconds: Callable[[int], float] | None = None) -> None:
        self._cpu_seconds = cpu_seconds or cpu_seconds_of
        self._is_settled = False

    def report(self, board: Board, pids: Mapping[int, int]) -> str:
        """The message, if it is time for it; `pids`: the processes of the ranks of this host, 0 for
        a rank that has ended."""
        if self._is_settled:
            return ""
        living = {rank: pid for rank, pid in pids.items() if pid}
        stage = max((board.stage(rank) for rank in pids), default=ScriptStage.STARTED)
        if stage >= ScriptStage.STEP:
            self._is_settled = True
            return ""
        if not living or min(map(self._cpu_seconds, living.values())) < PATIENCE:
            return ""
        self._is_settled = True
        missing = "made a recover.Step" if stage is ScriptStage.WORLD else "called recover.init()"
        return (
            f"the ranks have computed for {PATIENCE:g} s, and none has {missing} yet: until then each of them runs the "
            "script by itself, and no death is repaired; docs/guides/porting.md says what to change in a script"
        )


def cpu_seconds_of(pid: int) -> float:
    """CPU time that a process has used; 0 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
