"""TensorBoard and Weights & Biases: curves of the run, written by whoever writes the journal."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from recover.train.config import Config
from recover.world import ending

AGAIN = 10  # steps that a successor logs once more: the last ones of a killed process may be in no file
CURVES = ("loss", "heldout_loss", "grad_norm", "lr", "microbatches", "replicas", "seconds")


class Sinks:
    """Opened by the rank that writes, when it first does; a successor opens its own."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config, self._run_dir = config, run_dir
        self._off = not config.log.tensorboard and not config.log.wandb
        self._logged: int | None = None
        self._events: Any = None
        self._wandb: Any = None

    def log(self, kept: Collection[Mapping[str, Any]]) -> None:
        """Log the steps that have not been logged yet."""
        if self._off:
            return
        try:
            self._log_new(kept)
        except Exception as error:  # a service that fails must not cost a replica, and then its successor
            self._off = True
            text = f"no more curves are logged ({type(error).__name__}: {error}); steps.jsonl has them"
            ending.log(text)
            print(f"recover: {text}", flush=True)

    def _log_new(self, kept: Collection[Mapping[str, Any]]) -> None:
        if self._logged is None:
            recent = list(kept)[-AGAIN:]
            if not recent:
                return
            self._open(first=recent[0]["step"])
            self._logged = recent[0]["step"] - 1
        for line in kept:
            if line["step"] > self._logged:
                self._logged = line["step"]
                self._log(line)

    def close(self) -> None:
        try:
            if self._events is not None:
                self._events.close()
            if self._wandb is not None:
                self._wandb.finish()
        except Exception as error:
            ending.log(f"the curves could not be closed: {error}")

    def _open(self, first: int) -> None:
        if self._config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # What a dead writer has logged from `first` on is superseded.
            self._events = SummaryWriter(str(self._run_dir / "tensorboard"), purge_step=first)
        if self._config.log.wandb:
            import wandb

            os.environ.setdefault("WANDB_SILENT", "true")
            name = self._run_dir.name
            self._wandb = wandb.init(
                project=self._config.log.wandb, name=name, id=name, resume="allow", dir=str(self._run_dir)
            )

    def _log(self, line: Mapping[str, Any]) -> None:
        values = {name: line[name] for name in CURVES if line.get(name) is not None}
        if line["seconds"] > 0:
            values["tokens_per_second"] = line["tokens"] / line["seconds"]
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, line["step"])
            self._events.flush()
        if self._wandb is not None:
            self._wandb.log(values, step=line["step"])
