"""Records of users' scripts: every committed step of every `recover.Step` is recorded without the script's help.

The files are those of `recover train`. Nothing that a script does (several Steps, one after the other or alternating,
evaluation in between, files of its own) keeps a step from being recorded, and a record that cannot be written never
keeps a step from being taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from recover.gradients.optimizers import groups_of
from recover.gradients.parts import local_part
from recover.gradients.state_hash import parameters_digest
from recover.runs.records.environments import note_environment
from recover.runs.records.kinds import StepRecord
from recover.runs.writing.environment_facts import environment, script_facts
from recover.runs.writing.run_records import note_gpu_memory, step_line
from recover.runs.writing.run_writer import RecordedStep, RunWriter
from recover.runs.writing.script_time import ScriptTime, Spent
from recover.world import rank_exit
from recover.world.world import World


def records_of(
    world: World, step: RecordedStep, model: torch.nn.Module, optimizer: Any, exact: bool
) -> StepRecords | NoRecords:
    """A context manager around each step of `step`: on exit, the committed step is recorded."""
    if not world.job.records or not world.job.run_dir:
        return NoRecords()
    if world not in _of_world:
        _of_world[world] = ScriptRecords(world, Path(world.job.run_dir))
    return StepRecords(_of_world[world], step, model, optimizer, exact)


class NoRecords(nullcontext[None]):
    """For jobs without records: nothing is written and nothing is sent to a joining replica."""

    def heldout(self, loss: float) -> None:
        pass

    def spending(self, name: Spent) -> AbstractContextManager[None]:
        return nullcontext()

    def backward_done(self) -> None:
        pass

    def next_microbatch(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class StepRecords:
    """The records of one Step of the script. Most scripts have one, and then the run's step numbers are its own."""

    def __init__(
        self,
        records: ScriptRecords,
        step: RecordedStep,
        model: torch.nn.Module,
        optimizer: Any,
        exact: bool,
    ) -> None:
        self.step, self.model, self.exact = step, model, exact
        self.part = records.add(self)  # which Step of the script this is, from 1 on
        self.ahead = 0  # number of a step in the run, minus its number in this Step
        self.began, self.lr = 0.0, 0.0
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._records, self.optimizer = records, optimizer
        self.spending = records.time.spending
        self.backward_done = records.time.backward_done
        self.next_microbatch = records.time.next_microbatch

    def __enter__(self) -> None:
        self._records.time.begin_step()
        # Of the first group of the first optimizer. A custom optimizer may have no learning rate.
        self.began, self.lr = time.perf_counter(), float(groups_of(self.optimizer)[0].get("lr", 0.0))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._records.committed(self)
        else:
            self._records.time.leave_step()

    def heldout(self, loss: float) -> None:
        """Record a loss on held-out data. The line of the last step is written already: the next line has it."""
        self._records.time.evaluated()
        self._records.heldout = {"heldout_loss": loss, "heldout_step": self.step.index + self.ahead}

    def state_dict(self) -> dict[str, Any]:
        """State for a joining replica, which may be the next writer."""
        return {"ahead": self.ahead, "run": self._records.writer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ahead = state["ahead"]
        self._records.writer.load_state_dict(state["run"])


class ScriptRecords:
    """All records of one script. Every rank holds the same."""

    def __init__(self, world: World, run_dir: Path) -> None:
        self._world = world
        self.writer = RunWriter(world, run_dir)
        self.time = ScriptTime(world)
        self._steps: list[StepRecords] = []
        self.heldout: dict[str, Any] = {}  # for the next line
        self._gave_up = self._facts_written = False
        world.closing.append(lambda: self._try(self._finish))

    def add(self, step: StepRecords) -> int:
        self._steps.append(step)
        return len(self._steps)

    def committed(self, records: StepRecords) -> None:
        """Record the step that was just committed."""
        seconds, spent = time.perf_counter() - records.began, self.time.commit_step()
        self._try(lambda: self._write(records, seconds, spent))
        self.time.recorded()

    def _write(self, records: StepRecords, seconds: float, spent: dict[Spent, float]) -> None:
        step = records.step
        # The numbers of the run only grow, whichever Step took the previous step: the same on all survivors.
        records.ahead = max(records.ahead, self.writer.last + 1 - step.index)
        line = step_line(step, self._world, records.lr, seconds)
        line["step"] = step.index + records.ahead
        if records.ahead or records.part > 1:
            line["own_step"], line["part"] = step.index, records.part
        note_gpu_memory(line, records.device)
        line |= spent  # type: ignore[typeddict-item]
        line |= self.heldout  # type: ignore[typeddict-item]
        self.heldout = {}
        self.writer.commit(line, step, records.exact)
        self._write_environment(records, line)

    def _write_environment(self, records: StepRecords, line: StepRecord) -> None:
        """Write `environment.json`, once by each rank that writes records: a successor's host may differ."""
        if self._facts_written or not self.writer.writing:
            return
        self._facts_written = True
        facts = environment(records.step, self._world, records.optimizer, records.device) | {
            "samples": "exact" if records.exact else "partitioned",
            "policy": records.step.policy,
            "global_batch": line["microbatches"],
            **script_facts(),
        }
        note_environment(Path(str(self._world.job.run_dir)), self.writer.first, facts)

    def _finish(self) -> None:
        """Finish the records after the end of the script. If the writer dies here, its successor does this again."""
        if not self.writer.first:
            return  # no step was taken
        self.writer.finish_lines()
        if self.writer.writing:
            self.writer.write_summary(self._digest(), self.heldout)

    def _digest(self) -> str | None:
        """Digest of the parameters, if there is one model and one rank holds all of it."""
        if len(self._steps) > 1 or self._world.grid.replica_size > 1:
            return None
        named = sorted((name, local_part(p.detach())) for name, p in self._steps[0].model.named_parameters())
        return parameters_digest(named)

    def _try(self, act: Callable[[], object]) -> None:
        """Call `act`. An error in writing records must not cost a replica: it is reported once, and ends
        the recording."""
        if self._gave_up:
            return
        try:
            act()
        except Exception as error:
            self._gave_up = True
            if self.writer.writing:
                text = f"no more records are written ({type(error).__name__}: {error}); the run goes on"
                rank_exit.report(text)


_of_world: WeakKeyDictionary[World, ScriptRecords] = WeakKeyDictionary()
