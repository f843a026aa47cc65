"""Runs torchtitan on CPUs, alone and on ReCoVer, on texts and a tokenizer made here; for tests/integrations/titan."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recover_lab.peers.titan_assets import make_assets
from recover_lab.peers.titan_runs import PROGRAMS as LAB_PROGRAMS
from trainer_runs import TrainerRun, clean_environment, launch_command, run_to_end
from worlds import PROGRAMS as ALL_PROGRAMS

PROGRAMS = ALL_PROGRAMS / "titan"
PATHS = (PROGRAMS, LAB_PROGRAMS)  # of the job, and of the module that lets torchtitan run on a CPU


class Run(TrainerRun):
    @property
    def _logged(self) -> list[dict[str, Any]]:
        """Logged lines of all processes, by step."""
        files = self.out.glob("metrics-*.jsonl")
        found = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        return sorted(found, key=lambda line: int(line["step"]))

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Metrics of steps, as torchtitan logged them."""
        return [line for line in self._logged if "loss" in line]

    @property
    def validations(self) -> dict[int, float]:
        return {line["step"]: line["validation"] for line in self._logged if "validation" in line}

    @property
    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.lines}

    @property
    def ends(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self.out.glob("end-*.json")]

    @property
    def digest(self) -> str:
        (found,) = {end["digest"] for end in self.ends}
        return str(found)


class Titan:
    """Starts runs under one directory."""

    def __init__(self, place: Path) -> None:
        self.place, self.assets = place, make_assets(place / "assets")

    def seed(self, config: str) -> None:
        """Write a checkpoint of step 0, for runs of different shapes that must begin with the same state."""
        run = self.stock(f"seed-{config}", 1, config, ["--checkpoint.create-seed-checkpoint"])
        assert run.code == 0, run.output

    def stock(
        self, name: str, ranks: int, config: str, arguments: Sequence[str] = (), folder: str = ""
    ) -> Run:
        """torchtitan alone, under torchrun."""
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "--log-dir",
            str(self.place / name / "torchrun"),  # otherwise a temporary directory that stays
        ]
        command += [str(PROGRAMS / "titan_train.py"), "--module", "titan_job", "--config", config]
        return self._run(name, config, [*command, *arguments], folder)

    def recover(
        self,
        name: str,
        ranks: int,
        config: str,
        arguments: Sequence[str] = (),
        folder: str = "",
        options: Sequence[str] = (),
        kills: Sequence[str] = (),
        **environment: str,
    ) -> Run:
        command = launch_command(ranks, self.place / name / "run", options, kills)
        command += [str(PROGRAMS / "titan_train.py"), "--module", "recover.integrations.titan"]
        command += ["--config", f"titan_job.{config}", *arguments]
        return self._run(name, config, command, folder, **environment)

    def _run(self, name: str, config: str, command: list[str], folder: str, **environment: str) -> Run:
        """`folder`: for checkpoints and metrics; by default one of its own."""
        out, dump = self.place / name, self.place / (folder or name) / "dump"
        seed = self.place / f"seed-{config}" / "dump" / "checkpoint"
        if seed.is_dir() and not (dump / "checkpoint").exists():
            shutil.copytree(seed, dump / "checkpoint")
        variables = clean_environment(
            PYTHONPATH=os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")]),
            TITAN_ASSETS=str(self.assets),
            TITAN_OUT=str(out),
            HF_HOME=str(self.place / "huggingface"),
            HF_HUB_OFFLINE="1",
            **environment,
        )
        whole = [*command, "--checkpoint.enable", "--dump-folder", str(dump)]
        return Run(*run_to_end(whole, variables, self.place), out)
