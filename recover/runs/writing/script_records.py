"""The records of a script of one's own: every committed step of every `recover.Step` is written down by itself.

The files are those of `recover train`. The script need not know of them, and nothing that it does (several Steps, one
after the other or in turns, evaluation in between, files of its own) keeps a step from being written, or a record that
cannot be written from being taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from recover.faults import parse_faults
from recover.gradients.parts import local_part
from recover.gradients.state_hash import parameters_digest
from recover.runs.writing.journal import Journal
from recover.runs.writing.run_records import (
    CommittedStep,
    Repaired,
    incident_line,
    loss_line,
    spans,
    step_line,
    summary,
    write_json,
)
from recover.world import rank_exit
from recover.world.world import World


class OwnStep(CommittedStep, Protocol):
    """A `recover.Step`, as far as it is written down."""

    samples: list[int]

    @property
    def incidents(self) -> Sequence[Repaired]: ...


def records_of(
    world: World, step: OwnStep, model: torch.nn.Module, optimizer: torch.optim.Optimizer, exact: bool
) -> PartOfRun | NoRecords:
    """Be inside of it while a step is taken: what is committed is written down when it is left."""
    if not world.job.records or not world.job.run_dir:
        return NoRecords()
    if world not in _kept:
        _kept[world] = OwnRecords(world, Path(world.job.run_dir))
    return PartOfRun(_kept[world], step, model, optimizer, exact)


class NoRecords(nullcontext[None]):
    """Nothing is written down, and one that joins need not know of it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class PartOfRun:
    """One Step of the script. Most scripts have one, and then the numbers are its own."""

    def __init__(
        self,
        records: OwnRecords,
        step: OwnStep,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        exact: bool,
    ) -> None:
        self.step, self.model, self.exact = step, model, exact
        self.number = records.add(self)
        self.ahead = 0  # by how much the number of a step in the run is higher than that in its Step
        self.began, self.lr = 0.0, 0.0
        self._records, self._optimizer = records, optimizer

    def __enter__(self) -> None:
        # An optimizer of one's own may have none.
        self.began, self.lr = time.perf_counter(), float(self._optimizer.param_groups[0].get("lr", 0.0))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._records.committed(self)

    def state_dict(self) -> dict[str, Any]:
        """For a replica that joins: it may be the one that writes next."""
        return {"ahead": self.ahead, "run": self._records.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ahead = state["ahead"]
        self._records.load_state_dict(state["run"])


class OwnRecords:
    """All that a job writes down of the script that it runs. All ranks hold the same."""

    def __init__(self, world: World, run_dir: Path) -> None:
        self._world, self._run_dir = world, run_dir
        self._journal = Journal(run_dir, world)
        self._kills = parse_faults(world.job.faults)
        self._parts: list[PartOfRun] = []
        self._last = self._first = 0  # numbers of steps
        self._known = set(range(world.grid.ranks))  # all who have ever been members
        self._lost: set[int] = set()  # those of them whose loss is written down
        self._gave_up = False
        world.closing.append(lambda: self._try(self._finish))

    def add(self, part: PartOfRun) -> int:
        self._parts.append(part)
        return len(self._parts)

    def committed(self, part: PartOfRun) -> None:
        """The step of this part that was just committed."""
        self._try(lambda: self._write(part, time.perf_counter() - part.began))

    def _write(self, part: PartOfRun, seconds: float) -> None:
        step = part.step
        # Numbers only grow, whichever Step has taken the one before: on all survivors alike.
        part.ahead = max(part.ahead, self._last + 1 - step.index)
        number = self._last = step.index + part.ahead
        if not self._first:
            self._begin_at(number)
        line = step_line(step, self._world, part.lr, seconds)
        line["step"] = number
        if part.ahead or part.number > 1:
            line["own_step"], line["part"] = step.index, part.number
        incidents = [incident_line(incident, self._kills, part.exact) for incident in step.incidents]
        for incident in incidents:
            incident["step"] = number
            self._known.update(incident.get("joined_ranks", ()))
            self._lost.update(incident["dead_ranks"])
        incidents += self._others_lost(number)
        rank_exit.log(f"step {number}: loss {step.loss:.6f}, samples {spans(step.samples)}")
        self._journal.commit(line, incidents)

    def state_dict(self) -> dict[str, Any]:
        steps = {"first": self._first, "last": self._last}
        return {**steps, "known": self._known, "lost": self._lost, "journal": self._journal.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last, self._known, self._lost = state["last"], set(state["known"]), set(state["lost"])
        self._journal.load_state_dict(state["journal"])
        if state["first"]:
            self._begin_at(state["first"])

    def _begin_at(self, number: int) -> None:
        self._first = number
        for lines in (self._journal.steps, self._journal.incidents):
            lines.since = (number,)

    def _others_lost(self, number: int) -> list[Any]:
        """Who died before the first step, after the last one, or where the script has repaired the world by itself."""
        ranks = sorted(self._known - set(self._world.members) - self._lost)
        self._lost.update(ranks)
        seconds = self._world.last_census.seconds
        return [loss_line(self._world, number, ranks, seconds, self._kills)] if ranks else []

    def _finish(self) -> None:
        """The script has ended. Whoever writes may die over it: then its successor does this again."""
        if not self._first:
            return  # no step was taken: there is nothing to tell
        self._journal.incidents.kept.extend(self._others_lost(self._last))
        self._journal.finish()
        if self._journal.writing:
            steps, incidents = self._journal.steps.all(), self._journal.incidents.all()
            facts = summary(self._run_dir, self._world, self._digest(), self._first - 1, steps, incidents)
            if not write_json(self._run_dir / "summary.json", facts):
                rank_exit.report(f"lost: {self._run_dir / 'summary.json'}, for the disk did not take it")

    def _digest(self) -> str | None:
        """Of the parameters, where one rank has all of them and there is one model."""
        if len(self._parts) > 1 or self._world.grid.replica_size > 1:
            return None
        named = sorted((name, local_part(p.detach())) for name, p in self._parts[0].model.named_parameters())
        return parameters_digest(named)

    def _try(self, act: Callable[[], object]) -> None:
        """Records are for people: what goes wrong with them costs no replica, and is said once."""
        if self._gave_up:
            return
        try:
            act()
        except Exception as error:
            self._gave_up = True
            if self._journal.writing:
                text = f"no more records are written ({type(error).__name__}: {error}); the run goes on"
                rank_exit.report(text)


_kept: WeakKeyDictionary[World, OwnRecords] = WeakKeyDictionary()
