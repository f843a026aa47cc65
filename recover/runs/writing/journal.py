"""`steps.jsonl` and `incidents.jsonl`: one surviving rank writes, and all of them keep the latest lines.

The lowest living rank writes. If hosts have run directories of their own, the lowest rank of each directory writes
there. There are never two writers of a file: a repair ends only when the dead ranks are known to be gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from recover.job.record_files import FILES
from recover.runs.records.json_lines import LineFile
from recover.runs.records.kinds import IncidentRecord, StepRecord
from recover.world import rank_exit
from recover.world.world import World
from recover.world.writers import writers


class Journal:
    """The two files, and which rank writes them."""

    def __init__(
        self,
        run_dir: Path,
        world: World,
        also: Callable[[Collection[StepRecord]], object] = lambda kept: None,
    ) -> None:
        """`also` is called with the latest steps by the rank that writes, whenever it has written."""
        self.steps: LineFile[StepRecord] = LineFile(run_dir / "steps.jsonl", "step")
        self.incidents: LineFile[IncidentRecord] = LineFile(run_dir / "incidents.jsonl", "step", "epoch")
        self._world, self._also = world, also
        self._complained = False

    @property
    def writing(self) -> bool:
        """Whether this rank writes. All survivors agree on which rank does."""
        return self._world.rank in writers(self._world)

    def commit(self, line: StepRecord, incidents: Sequence[IncidentRecord]) -> None:
        """Add the lines of a committed step. On a full disk they stay in memory until there is room."""
        self.steps.kept.append(line)
        self.incidents.kept.extend(incidents)
        try:
            self._write()
        except OSError as error:
            if not self._complained:
                self._complained = True
                rank_exit.report(
                    f"{error}; the run goes on, and lines are kept in memory until they can be written"
                )

    def finish(self) -> None:
        """Write the last lines at the end of the run: wait for the disk for a limited time, and report lost lines.
        Never raises OSError."""
        self._complained = True
        if FILES.retry(self._write, "the last steps"):
            return
        for lines in (self.steps, self.incidents):
            if lost := len(lines.missing()) + lines.lost:
                rank_exit.report(f"lost: {lost} lines of {lines.path}, for the disk did not take them")

    def state_dict(self) -> dict[str, Any]:
        """State for a joining replica, which may be the next writer."""
        return {"steps": list(self.steps.kept), "incidents": list(self.incidents.kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for lines, known in ((self.steps, state["steps"]), (self.incidents, state["incidents"])):
            lines.take_over(known)

    def _write(self) -> None:
        """Write the missing lines, if this rank is the writer."""
        if not self.writing:  # a rank with a lower number may have joined, and may die again
            self.incidents.leave_to_another()
            self.steps.leave_to_another()
            return
        self.incidents.write()
        self.steps.write()
        self._also(self.steps.kept)
