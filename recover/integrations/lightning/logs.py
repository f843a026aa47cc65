"""Logging: combines `self.log` of training_step over all microbatches of a step; loggers write once."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException

_REDUCTIONS = {
    "mean": "mean",
    "avg": "mean",
    "sum": "sum",
    "max": "max",
    "amax": "max",
    "min": "min",
    "amin": "min",
}
_OPTIONS = ("prog_bar", "logger", "on_step", "on_epoch")


class StepLog:
    """Values that training_step logs for the microbatches of one replica, and their combination over all."""

    def __init__(self) -> None:
        self.epoch: dict[str, list[Any]] = {}  # of all replicas, in this epoch so far: value, weight, options
        self.losses: dict[int, torch.Tensor] = {}  # by the number of the microbatch
        self._values: dict[int, dict[str, tuple[Any, float, Any]]] = {}  # on a device until the step is over
        self._arrived: dict[str, list[Any]] = {}
        self._deferred: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        self._values, self.losses = {}, {}

    def arrive(self, epoch: dict[str, list[Any]]) -> None:
        """A joining replica takes over what the members have logged in this epoch."""
        self.epoch, self._arrived = epoch, dict(epoch)

    @contextmanager
    def collecting(self, module: Any, number: int, batch: Any) -> Iterator[None]:
        """Collect the calls of `module.log` while a microbatch runs. After a death it may run again: the last run
        counts."""
        values = self._values[number] = {}

        def log(
            name: str, value: Any, *, batch_size: Any = None, reduce_fx: Any = "mean", **options: Any
        ) -> None:
            how = _REDUCTIONS.get(getattr(reduce_fx, "__name__", str(reduce_fx)))
            if not isinstance(value, torch.Tensor | int | float) or how is None:
                raise TypeError(
                    f"self.log({name!r}) in training_step was given a {type(value).__name__}, with reduce_fx="
                    f"{reduce_fx!r}, which cannot be combined over the microbatches of several replicas; log a number "
                    "(of a torchmetrics.Metric: what it returns), with reduce_fx mean, sum, min or max"
                )
            kept = {key: options[key] for key in _OPTIONS if key in options}
            value = value.detach() if isinstance(value, torch.Tensor) else value
            values[name] = (value, float(batch_size or _size(batch)), {**kept, "reduce_fx": how})

        with _replaced(module, log):
            yield

    @contextmanager
    def deferring(self, module: Any) -> Iterator[None]:
        """Defer the calls of `module.log`: a joining replica takes its first step before the trainer has begun a batch,
        and the trainer accepts logging only inside one."""
        with _replaced(module, lambda *arguments, **named: self._deferred.append((arguments, named))):
            yield

    def mine(self, numbers: Iterable[int]) -> bytes:
        """The values of the microbatches that this replica contributed, as bytes for the other replicas."""
        found: dict[str, list[Any]] = {}
        for number in numbers:
            for name, (logged, weight, options) in self._values[number].items():
                value, is_loss = float(logged), float(logged) == float(self.losses[number])
                _merge(found, name, [value * weight, weight, value, 1, value, value, is_loss, options])
        return json.dumps(found).encode()

    def write(self, log: Callable[..., None], every: Iterable[bytes], loss: float, batches: int) -> None:
        """Log what all replicas have collected, the same on all of them. A replica that died after it had contributed
        `batches` to the step is missing: what it logged is taken to be the mean of the others. Where the
        logged value is the loss of training_step, its mean is the loss of the step, which no death changes."""
        found: dict[str, list[Any]] = {}
        for theirs in every:
            for name, entry in json.loads(theirs).items():
                _merge(found, name, entry)
        arrived, self._arrived = self._arrived, {}
        for name, (value, weight, options) in arrived.items():
            log(name, value, batch_size=round(weight), **options)
        deferred, self._deferred = self._deferred, []
        for arguments, named in deferred:
            log(*arguments, **named)
        for name, (product, known, total, count, least, most, is_loss, options) in found.items():
            mean, how = loss if is_loss else product / known, options["reduce_fx"]
            weight, total = known * batches / count, total * batches / count
            value = {"mean": mean, "sum": total, "min": least, "max": most}[how]
            log(name, value, batch_size=round(weight), **options)
            before, heavy, _ = self.epoch.get(name, [value, 0.0, options])
            mean = (before * heavy + value * weight) / (heavy + weight)
            both = {"mean": mean, "sum": before * bool(heavy) + value}
            both |= {"min": min(before, value), "max": max(before, value)}
            self.epoch[name] = [both[how], heavy + weight, options]


@contextmanager
def _replaced(module: Any, log: Callable[..., None]) -> Iterator[None]:
    before = vars(module).get("log")
    module.log = log
    try:
        yield
    finally:
        del module.log
        if before is not None:
            module.log = before


def _merge(found: dict[str, list[Any]], name: str, entry: list[Any]) -> None:
    """Add up: weighted sum, weight, sum, number, least, most, whether it is the loss."""
    if (old := found.get(name)) is None:
        found[name] = list(entry)
        return
    old[:4] = [one + two for one, two in zip(old[:4], entry[:4], strict=True)]
    old[4:7] = min(old[4], entry[4]), max(old[5], entry[5]), old[6] and entry[6]


def _size(batch: Any) -> int:
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:  # no tensor in it
        return 1


def write_once(loggers: Iterable[Any], once: Callable[..., None]) -> None:
    """Make these loggers write on the first living replica only; `once` calls a function there."""
    for logger in loggers:
        for name in ("log_metrics", "log_hyperparams"):
            if not hasattr(write := getattr(logger, name), "is_once"):
                setattr(logger, name, _Once(logger, write, once))


class _Once:
    is_once = True

    def __init__(self, logger: Any, write: Callable[..., None], once: Callable[..., None]) -> None:
        self._logger, self._write, self._once = logger, write, once

    def __call__(self, *arguments: Any, **named: Any) -> None:
        self._once(self._act, *arguments, **named)

    def _act(self, *arguments: Any, **named: Any) -> None:
        rank_zero_only.rank = 0
        if isinstance(self._logger, CSVLogger):
            _go_on(self._logger)
        self._write(*arguments, **named)
        self._logger.save()


def _go_on(logger: CSVLogger) -> None:
    """Continue the file of a lost replica, with its columns. A new experiment would delete the file."""
    path = Path(logger.log_dir, "metrics.csv")
    kept = path.with_name("metrics.csv.kept")
    if logger._experiment is None and path.is_file():
        path.rename(kept)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about files that would be deleted: none are
        experiment: Any = logger.experiment
    if kept.is_file():
        kept.rename(path)
    if path.is_file() and not experiment.metrics:
        with path.open() as file:
            experiment.metrics_keys = file.readline().strip().split(",")
