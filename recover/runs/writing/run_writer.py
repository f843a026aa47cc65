"""The writer of a run's records: `steps.jsonl`, `incidents.jsonl` and `summary.json`.

The reference trainer and the records of users' scripts both write through `RunWriter`; what only one of them knows is
passed in as additional fields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from recover.faults import parse_faults
from recover.runs.records.kinds import IncidentRecord, StepRecord
from recover.runs.writing.journal import Journal
from recover.runs.writing.run_records import (
    CommittedStep,
    RecordedIncident,
    incident_line,
    loss_line,
    spans,
    summary,
    write_json,
)
from recover.world import rank_exit
from recover.world.world import World


class RecordedStep(CommittedStep, Protocol):
    """The part of `recover.Step` that the records need."""

    samples: list[int]

    @property
    def incidents(self) -> Sequence[RecordedIncident]: ...

    @property
    def numerics(self) -> dict[str, Any]: ...


class RunWriter:
    """Records of one job in one run directory. Every rank keeps the same records; the journal picks the one that
    writes them to disk. `also` is called with the latest steps by the rank that writes, whenever it has written."""

    def __init__(
        self,
        world: World,
        run_dir: Path,
        also: Callable[[Collection[StepRecord]], object] = lambda kept: None,
    ) -> None:
        self._world, self._run_dir = world, run_dir
        self._journal = Journal(run_dir, world, also)
        self._faults = parse_faults(world.job.faults)
        self.first = self.last = 0  # numbers of this job's first and last step; 0: none yet
        self._members = set(range(world.grid.ranks))  # all ranks that have ever been members
        self._lost: set[int] = set()  # those of them whose loss is recorded

    @property
    def writing(self) -> bool:
        """Whether this rank writes the files."""
        return self._journal.writing

    def begin_at(self, number: int) -> None:
        """This job writes the lines from step `number` on. Lines of an earlier job from there on are replaced."""
        self.first = number
        for lines in (self._journal.steps, self._journal.incidents):
            lines.since = (number,)

    def cut_earlier_job(self) -> None:
        """Remove the lines of steps that this job takes again, before its first step."""
        if not self.writing:
            return
        for lines in (self._journal.steps, self._journal.incidents):
            try:
                lines.cut_after(self.first - 1)
            except OSError as error:
                rank_exit.log(f"{lines.path} is cut when the first step is written: {error}")

    def commit(self, line: StepRecord, step: RecordedStep, exact: bool) -> None:
        """Record the step that was just committed. `line["step"]` is its number in the run, which is higher than
        `step.index` in a script with several Steps. `exact`: samples of lost replicas are run by others."""
        number = self.last = line["step"]
        if not self.first:
            self.begin_at(number)
        incidents = [incident_line(incident, self._faults, exact) for incident in step.incidents]
        for incident in incidents:
            incident["step"] = number
            self._members.update(incident.get("joined_ranks", ()))
            self._lost.update(incident["dead_ranks"], incident.get("left_ranks", ()))
        for loss in self._other_losses():
            _add_loss(incidents, loss)
        rank_exit.log(f"step {number}: loss {step.loss:.6f}, samples {spans(step.samples)}")
        self._journal.commit(line, incidents)

    def lost(self, ranks: Sequence[int], seconds: float) -> None:
        """Record ranks that were lost outside of any step, and the seconds that the repair took."""
        self._lost.update(ranks)
        self._journal.incidents.kept.append(self._loss(ranks, seconds))

    def finish_lines(self) -> None:
        """Write the last lines and wait for the disk. If the writer dies here, its successor calls this again."""
        self._journal.incidents.kept.extend(self._other_losses())
        self._journal.finish()

    def write_summary(self, digest: str | None, more: Mapping[str, Any] | None = None) -> None:
        """Write `summary.json`, with the facts in `more`, if this rank writes. Call it after `finish_lines`."""
        if not self.writing:
            return
        lines = self._journal.steps.all(), self._journal.incidents.all()
        facts = summary(self._run_dir, self._world, digest, self.first - 1, *lines)
        if not write_json(self._run_dir / "summary.json", facts | dict(more or {})):
            rank_exit.report(f"lost: {self._run_dir / 'summary.json'}, because the disk did not take it")

    def state_dict(self) -> dict[str, Any]:
        """State for a joining replica, which may be the next writer."""
        return {
            "first": self.first,
            "last": self.last,
            "members": self._members,
            "lost": self._lost,
            "journal": self._journal.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last, self._members, self._lost = state["last"], set(state["members"]), set(state["lost"])
        self._journal.load_state_dict(state["journal"])
        if state["first"]:
            self.begin_at(state["first"])

    def _other_losses(self) -> list[IncidentRecord]:
        """Ranks that died before the first step, after the last one, or while the script repaired the world itself."""
        ranks = sorted(self._members - set(self._world.members) - self._lost)
        self._lost.update(ranks)
        return [self._loss(ranks, self._world.last_census.seconds)] if ranks else []

    def _loss(self, ranks: Sequence[int], seconds: float) -> IncidentRecord:
        return loss_line(self._world, max(self.first, self.last), ranks, seconds, self._faults)


def _add_loss(incidents: list[IncidentRecord], loss: IncidentRecord) -> None:
    # Step and epoch identify a line of incidents.jsonl, to writers and readers alike: a loss that is found in the same
    # epoch as the last incident belongs to its line.
    if not incidents or incidents[-1]["epoch"] != loss["epoch"]:
        incidents.append(loss)
        return
    last = incidents[-1]
    last["dead_ranks"] = sorted({*last["dead_ranks"], *loss["dead_ranks"]})
    last["dead_replicas"] = sorted({*last["dead_replicas"], *loss["dead_replicas"]})
    if evicted := {**loss.get("evicted", {}), **last.get("evicted", {})}:
        last["evicted"] = evicted
