"""Reads the records of runs: finished, running, or killed in the middle of a line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from recover.runs.records.curve_table import CurveTable
from recover.runs.records.feed import RunFeed
from recover.runs.records.goodput import account
from recover.runs.records.job_log import job_lines, launches
from recover.runs.records.job_state import JobState, job_state
from recover.runs.records.kinds import Line
from recover.runs.records.launch_history import LaunchHistory, LaunchPart


@dataclass
class Run:
    path: Path
    name: str
    steps: list[Line]  # in the order of steps, each once
    incidents: list[Line]
    summary: Line  # empty while the run is not finished
    config: Line
    unreadable: int  # lines without a record, except for an unfinished last one
    job: list[Line] = field(default_factory=list)  # lines of the launcher

    @property
    def global_batch(self) -> int | None:
        """B as configured, or that of the first committed step."""
        first = self.steps[0].get("microbatches") if self.steps else None
        return self.config.get("global_batch", first)

    @cached_property
    def goodput(self) -> dict[str, Any]:
        """The account up to the time of the summary, or else up to the last step."""
        until = (self.summary.get("goodput") or {}).get("until")
        replicas = self.summary.get("replicas_start") or self.config.get("replicas") or 0
        return account(self.steps, self.incidents, launches(self.job), until, replicas)

    @property
    def state(self) -> JobState:
        """Whether its job runs, and how it ended."""
        last = self.steps[-1] if self.steps else {}
        return job_state(self.path, self.job, self.summary, last, self.config.get("steps"))

    @cached_property
    def curves(self) -> CurveTable:
        table = CurveTable()
        for line in self.steps:
            table.add(line)
        table.add_heldout(self.summary)  # evaluated after the last step
        return table

    @cached_property
    def launch_parts(self) -> list[LaunchPart]:
        """The launches that this run consists of."""
        history = LaunchHistory(launches(self.job))
        for line in self.steps:
            history.add(line)
        return history.parts(
            self.incidents, self.summary.get("replicas_start") or self.config.get("replicas") or 0
        )


def read_runs(paths: list[Path]) -> list[Run]:
    """Read these run directories. Runs of the same name are called by their paths."""
    names = [path.resolve().name for path in paths]
    return [
        _read(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]


def _read(path: Path, name: str) -> Run:
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a directory; name the run directory of a `recover train` or `recover run`"
        )
    if not any((path / file).exists() for file in ("steps.jsonl", "config.yaml", "job.jsonl")):
        raise ValueError(
            f"{path} is not a run directory: it holds neither steps.jsonl nor config.yaml nor job.jsonl; "
            "name one that `recover train` or `recover run` made"
        )
    feed = RunFeed(path)
    update = feed.read(unfinished=True)
    return Run(
        path,
        name,
        [line for line, _ in update.steps],
        update.incidents,
        _mapping(path / "summary.json"),
        _mapping(path / "config.yaml"),
        feed.unreadable,
        job_lines(path),
    )


def _mapping(path: Path) -> Line:
    """The content of a YAML or JSON file; empty if it cannot be read."""
    if not path.exists():
        return {}
    text = path.read_bytes()
    if path.suffix == ".json":
        try:
            value = json.loads(text)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}
