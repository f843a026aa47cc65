"""Runs Hugging Face's Trainer, alone and on ReCoVer: the programs of tests/programs/hf, for tests/integrations/hf."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer_runs import TrainerRun, clean_environment, launch_command, run_to_end
from worlds import PROGRAMS as ALL_PROGRAMS

PROGRAMS = ALL_PROGRAMS / "hf"


class Run(TrainerRun):
    @cached_property
    def notes(self) -> list[dict[str, Any]]:
        """Notes of all processes."""
        files = sorted(self.out.glob("notes-*.jsonl"))
        return [json.loads(line) for path in files for line in path.read_text().splitlines()]

    @property
    def ends(self) -> list[dict[str, Any]]:
        return [note for note in self.notes if note.get("end")]

    def logged(self, name: str) -> dict[int, float]:
        """Logged values by step, the same in all processes."""
        found: dict[int, set[float]] = {}
        for note in self.notes:
            if name in note.get("logs", {}):
                found.setdefault(note["step"], set()).add(note["logs"][name])
        assert all(len(values) == 1 for values in found.values()), found
        return {step: values.pop() for step, values in sorted(found.items())}

    def printed(self, name: str) -> list[str]:
        """Values in the lines that the trainer prints."""
        return re.findall(rf"'{name}': '([^']+)'", self.output)

    @property
    def history(self) -> dict[int, float]:
        """Losses of all steps, as the state of the trainer has them in the end."""
        return {line["step"]: line["loss"] for line in self.ends[0]["history"] if line["loss"] is not None}


class HuggingFace:
    """Starts runs under one directory."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def stock(self, name: str, program: str = "hf_job.py", **settings: Any) -> Run:
        return self._run(name, [sys.executable, *self._script(program, "stock", settings)])

    def recover(
        self,
        name: str,
        ranks: int,
        options: Sequence[str] = (),
        kills: Sequence[str] = (),
        program: str = "hf_job.py",
        **settings: Any,
    ) -> Run:
        command = launch_command(ranks, self.place / name / "run", options, kills)
        return self._run(name, [*command, *self._script(program, "ours", settings)])

    def start(self, name: str, ranks: int, **settings: Any) -> subprocess.Popen[str]:
        """Start a run without waiting for its end."""
        out = self.place / name
        out.mkdir()
        return subprocess.Popen(
            [*launch_command(ranks, out / "run"), *self._script("hf_job.py", "ours", settings)],
            env=environment(out),
            cwd=out,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _script(self, program: str, kind: str, settings: dict[str, Any]) -> list[str]:
        return [str(PROGRAMS / program), kind, json.dumps(settings)]

    def _run(self, name: str, command: list[str]) -> Run:
        out = self.place / name
        out.mkdir(exist_ok=True)
        return Run(*run_to_end(command, environment(out), out), out)


def environment(out: Path) -> dict[str, str]:
    return clean_environment(
        PYTHONPATH=os.pathsep.join([str(PROGRAMS), os.environ.get("PYTHONPATH", "")]),
        HF_OUT=str(out),
        HF_HOME=str(out / "huggingface"),
        HF_HUB_OFFLINE="1",
        CI="1",  # TRL sends no telemetry
    )
