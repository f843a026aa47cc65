"""Runs Hugging Face's Trainer, alone and on ReCoVer: the programs of tests/programs/hf, for tests/integrations/hf."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from patience import PATIENCE
from worlds import PROGRAMS as ALL_PROGRAMS

PROGRAMS = ALL_PROGRAMS / "hf"


@dataclass
class Run:
    code: int
    output: str
    out: Path

    @cached_property
    def notes(self) -> list[dict[str, Any]]:
        """Of all processes."""
        files = sorted(self.out.glob("notes-*.jsonl"))
        return [json.loads(line) for path in files for line in path.read_text().splitlines()]

    @property
    def ends(self) -> list[dict[str, Any]]:
        return [note for note in self.notes if note.get("end")]

    def logged(self, name: str) -> dict[int, float]:
        """By step, as each process has it that was there."""
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
        for kill in kills:
            options = [*options, "--kill", kill]
        command = self._command(name, ranks, options)
        return self._run(name, [*command, *self._script(program, "ours", settings)])

    def start(self, name: str, ranks: int, **settings: Any) -> subprocess.Popen[str]:
        """The same, at work."""
        out = self.place / name
        out.mkdir()
        return subprocess.Popen(
            [*self._command(name, ranks), *self._script("hf_job.py", "ours", settings)],
            env=environment(out),
            cwd=out,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _command(self, name: str, ranks: int, options: Sequence[str] = ()) -> list[str]:
        command = [sys.executable, "-m", "recover.cli", "run", "-n", str(ranks), "--page", "off"]
        return [*command, "--run-dir", str(self.place / name / "run"), "--timeout", str(PATIENCE), *options]

    def _script(self, program: str, kind: str, settings: dict[str, Any]) -> list[str]:
        return [str(PROGRAMS / program), kind, json.dumps(settings)]

    def _run(self, name: str, command: list[str]) -> Run:
        out = self.place / name
        out.mkdir(exist_ok=True)
        result = subprocess.run(
            command,
            env=environment(out),
            cwd=out,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )
        return Run(result.returncode, result.stdout, out)


def environment(out: Path) -> dict[str, str]:
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("RECOVER_")},
        "PYTHONPATH": os.pathsep.join([str(PROGRAMS), os.environ.get("PYTHONPATH", "")]),
        "HF_OUT": str(out),
        "HF_HOME": str(out / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CI": "1",  # TRL sends no telemetry
    }
