"""Progress in the terminal, from the files of the run while they grow. No rank is asked for anything."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Self, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from recover.runs.records.feed import RunFeed
from recover.runs.records.job_log import job_lines
from recover.runs.records.kinds import IncidentRecord, Line, StepRecord
from recover.runs.records.root_causes import stories
from recover.runs.records.sentences import in_replicas, sentence
from recover.train.config import Config

QUIET = 1.0  # seconds between two lines without a terminal
SMOOTHING = 0.2


class Screen:
    """Progress as a bar on a terminal and as lines elsewhere; every failure as one sentence."""

    def __init__(self, config: Config, run_dir: Path, first: int) -> None:
        self._config, self._run_dir = config, run_dir
        self._feed = RunFeed(run_dir, new_only=True)
        self._console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
        self._rate = 0.0
        self._said = 0.0
        self._slow: set[str] = set()  # replicas that were named as stragglers
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"),
                TextColumn("ETA"), TimeRemainingColumn(), console=self._console,
            )  # fmt: skip
            self._task = self._bar.add_task("starting", total=config.steps, completed=first - 1)

    def update(self) -> None:
        for line, incidents in self._feed.read().steps:
            speed = line["tokens"] / line["seconds"] if line["seconds"] else 0.0
            self._rate = self._rate * (1 - SMOOTHING) + speed * SMOOTHING if self._rate else speed
            for incident in incidents:
                self.say(sentence(incident, line, self._config.global_batch, self._cause(incident)))
            for replica, factor in line.get("stragglers", {}).items():
                if replica not in self._slow:
                    self._slow.add(replica)
                    self.say(
                        f"step {line['step']}: replica {replica} takes {factor:g} times as long as the others"
                    )
            self._show(line)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.update()
        if self._bar is not None:
            self._bar.stop()
        for incident in self._feed.pending:
            self.say(sentence(incident, None, self._config.global_batch, self._cause(incident)))

    def _cause(self, incident: IncidentRecord) -> str:
        """The root cause in short; "" if it is not known."""
        seen = stories([cast(Line, incident)], job_lines(self._run_dir))
        return seen[0].short if seen and seen[0].seen else ""

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def _show(self, line: StepRecord) -> None:
        loss = "  -   " if line["loss"] is None else f"{line['loss']:.4f}"
        heldout = f"  held-out {line['heldout_loss']:.4f}" if "heldout_loss" in line else ""
        text = f"loss {loss}{heldout}  {self._rate:,.0f} tokens/s  {in_replicas(line['replicas'])}{gpu_use(line)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=line["step"], description=text)
            return
        now = time.monotonic()
        if now - self._said >= QUIET or line["step"] == self._config.steps or heldout:
            self._said = now
            left = (self._config.steps - line["step"]) * line["seconds"]
            self.say(f"step {line['step']}/{self._config.steps}  {text}  ETA {left:.0f} s")


def gpu_use(line: StepRecord) -> str:
    """The use of the GPU in a line; "" without a GPU."""
    used = f"  MFU {line['mfu']:.1%}" if "mfu" in line else ""
    return used + (f"  {line['gpu_peak_mib'] / 1024:.1f} GiB" if "gpu_peak_mib" in line else "")
