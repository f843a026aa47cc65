"""`steps.jsonl` and `incidents.jsonl`: one survivor writes, all of them remember.

The lowest living rank writes; where hosts have run directories of their own, the lowest of those that see the same one,
so that the records are on every host. A repair does not end before the dead are gone, so there are never two writers.
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
    """What a run writes down about its steps and its losses."""

    def __init__(
        self,
        run_dir: Path,
        world: World,
        also: Callable[[Collection[StepRecord]], object] = lambda kept: None,
    ) -> None:
        """`also` is shown the latest steps by the rank that writes, whenever it has written."""
        self.steps: LineFile[StepRecord] = LineFile(run_dir / "steps.jsonl", "step")
        self.incidents: LineFile[IncidentRecord] = LineFile(run_dir / "incidents.jsonl", "step", "epoch")
        self._world, self._also = world, also
        self._complained = False

    @property
    def writing(self) -> bool:
        """Whether it is this rank that writes: the same answer about the same rank on all survivors."""
        return self._world.rank in writers(self._world)

    def commit(self, line: StepRecord, incidents: Sequence[IncidentRecord]) -> None:
        """A step is committed. A full disk does not end the run: the lines stay in memory until there is room."""
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
        """The run has come to its end: wait for the disk while there is patience, and say what was lost. Never raises
        OSError."""
        self._complained = True
        if FILES.retry(self._write, "the last steps"):
            return
        for lines in (self.steps, self.incidents):
            if lost := len(lines.missing()) + lines.lost:
                rank_exit.report(f"lost: {lost} lines of {lines.path}, for the disk did not take them")

    def state_dict(self) -> dict[str, Any]:
        """For a replica that joins: it may be the one that writes next."""
        return {"steps": list(self.steps.kept), "incidents": list(self.incidents.kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for lines, known in ((self.steps, state["steps"]), (self.incidents, state["incidents"])):
            lines.take_over(known)

    def _write(self) -> None:
        """Write what is not written yet, if it is this rank that writes."""
        if not self.writing:  # one with a lower number may have joined since, and die again
            self.incidents.leave_to_another()
            self.steps.leave_to_another()
            return
        self.incidents.write()
        self.steps.write()
        self._also(self.steps.kept)
