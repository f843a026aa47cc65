"""Runs a small Lightning job, alone and on ReCoVer; for tests/integrations/pl."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patience import wait_until
from trainer_runs import TrainerRun, clean_environment, launch_command, run_to_end
from worlds import PROGRAMS as ALL_PROGRAMS

PROGRAMS = ALL_PROGRAMS / "pl"


class Run(TrainerRun):
    def seen(self, key: str) -> list[list[dict[str, Any]]]:
        """Lines with this key that the callbacks wrote, by process."""
        files = [path.read_text().splitlines() for path in sorted(self.out.glob("seen-*.jsonl"))]
        return [[line for line in map(json.loads, lines) if key in line] for lines in files]

    @property
    def steps(self) -> dict[int, dict[str, Any]]:
        """Loss, rate and counts of each step: the same in all processes that took it."""
        found: dict[int, dict[str, Any]] = {}
        for lines in self.seen("step"):
            assert len({line["step"] for line in lines}) == len(lines), "a step is twice in a process"
            for line in lines:
                assert found.setdefault(line["step"], line) == line, self.output
        return dict(sorted(found.items()))

    @property
    def losses(self) -> dict[int, float]:
        return {number: line["loss"] for number, line in self.steps.items()}

    @property
    def rates(self) -> dict[int, float]:
        return {number: line["rate"] for number, line in self.steps.items()}

    @property
    def validations(self) -> dict[int, float]:
        return {line["validated"]: line["loss"] for lines in self.seen("validated") for line in lines}

    @property
    def rows(self) -> list[dict[str, str]]:
        """Rows of the CSV logger."""
        (path,) = self.out.glob("logs/*/metrics.csv")
        with path.open() as file:
            return list(csv.DictReader(file))

    def column(self, name: str) -> list[tuple[int, float]]:
        return [(int(row["step"]), float(row[name])) for row in self.rows if row[name]]

    @property
    def ends(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self.out.glob("end-*.json")]

    @property
    def saved(self) -> list[int]:
        names = [path.name for path in (self.out / "checkpoints").iterdir()]
        assert all(name.startswith("step=") and name.endswith(".ckpt") for name in names), names
        return sorted(int(name.removeprefix("step=").removesuffix(".ckpt")) for name in names)


class Lightning:
    """Starts runs under one directory."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def stock(self, name: str, arguments: Sequence[str], program: str = "pl_job.py") -> Run:
        return self._run(name, [sys.executable, str(PROGRAMS / program), "stock"], arguments)

    def command(self, name: str, ranks: int, options: Sequence[str], kills: Sequence[str]) -> list[str]:
        return launch_command(ranks, self.place / name / "run", options, kills)

    def recover(
        self,
        name: str,
        ranks: int,
        arguments: Sequence[str],
        options: Sequence[str] = (),
        kills: Sequence[str] = (),
        program: str = "pl_job.py",
    ) -> Run:
        command = self.command(name, ranks, options, kills)
        return self._run(name, [*command, str(PROGRAMS / program), "recover"], arguments)

    def stopped(self, name: str, step: int, arguments: Sequence[str], kills: Sequence[str] = ()) -> Run:
        """A run of two replicas, slow enough to be asked to stop (SIGTERM to its launcher) after that step."""
        out = self.place / name
        out.mkdir()
        command = [*self.command(name, 2, (), kills), str(PROGRAMS / "pl_job.py"), "recover"]
        with subprocess.Popen(
            [*command, "--out", str(out), *arguments, "--pace", "0.2"],
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            losses = Run(0, "", out)
            wait_until(lambda: max(losses.losses, default=0) >= step or process.poll() is not None)
            process.send_signal(signal.SIGTERM)
            output = process.communicate()[0]
        return Run(process.returncode, output, out)

    def program(self, name: str, command: Sequence[str]) -> Run:
        return self._run(name, command, (), with_out=False)

    def _run(self, name: str, command: Sequence[str], arguments: Sequence[str], with_out: bool = True) -> Run:
        out = self.place / name
        whole = [*command, *(["--out", str(out)] if with_out else []), *arguments]
        return Run(*run_to_end(whole, clean_environment(), self.place), out)
