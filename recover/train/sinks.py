"""TensorBoard and Weights & Biases: curves, logged by the rank that writes the records."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from recover.runs.records.curves import curves
from recover.train.config import Config
from recover.world import rank_exit

AGAIN = 10  # steps that a successor logs again: a killed process may not have written its last ones
Values = dict[str, Any]
Log = Callable[[Values, int], object]
Close = Callable[[], object]


class Sinks:
    """Opened by the writing rank when it first writes; a successor opens its own.

    A service that raises costs neither a replica nor the other service: it gets no more curves.
    """

    def __init__(self, config: Config, run_dir: Path, host: str | None = None) -> None:
        self._run_dir, self._name = run_dir, f"{run_dir.name}-{host}" if host else run_dir.name
        self._project = config.log.wandb
        self._openers: dict[str, Callable[[int], tuple[Log, Close]]] = {}
        if config.log.tensorboard:
            self._openers["TensorBoard"] = self._open_tensorboard
        if self._project:
            self._openers["Weights & Biases"] = self._open_wandb
        self._open: dict[str, tuple[Log, Close]] = {}
        self._logged: int | None = None

    def log(self, kept: Collection[Mapping[str, Any]]) -> None:
        """Log the steps that have not been logged yet."""
        if self._logged is None:
            recent = list(kept)[-AGAIN:]
            if not recent:
                return
            self._logged = recent[0]["step"] - 1
            for name in self._openers:
                self._try(name, self._start, name, recent[0]["step"])
        for line in kept:
            if line["step"] > self._logged:
                self._logged = line["step"]
                for name, (log, _) in list(self._open.items()):
                    self._try(name, log, curves(dict(line)), line["step"])

    def close(self) -> None:
        for name, (_, close) in list(self._open.items()):
            self._try(name, close)

    def _start(self, name: str, first: int) -> None:
        self._open[name] = self._openers[name](first)

    def _try(self, name: str, act: Callable[..., object], *arguments: object) -> None:
        try:
            act(*arguments)
        except (Exception, SystemExit) as error:  # it must not cost a replica, and then its successor
            self._open.pop(name, None)
            text = f"{name} gets no more curves ({type(error).__name__}: {error}); steps.jsonl has them"
            rank_exit.log(text)
            print(f"recover: {text}", flush=True)

    def _open_tensorboard(self, first: int) -> tuple[Log, Close]:
        from torch.utils.tensorboard import SummaryWriter

        # Events of a dead writer from `first` on are superseded.
        events = SummaryWriter(str(self._run_dir / "tensorboard"), purge_step=first)

        def log(values: Values, step: int) -> None:
            for name, value in values.items():
                events.add_scalar(name, value, step)
            events.flush()

        return log, events.close

    def _open_wandb(self, first: int) -> tuple[Log, Close]:
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        name = self._name
        run = wandb.init(project=self._project, name=name, id=name, resume="allow", dir=str(self._run_dir))
        return lambda values, step: run.log(values, step=step), run.finish
