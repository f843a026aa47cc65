"""Metrics of torchtitan, written once: by the first living replica, which builds the loggers
(TensorBoard, W&B) when it writes for the first time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.components.metrics import BaseLogger, MetricsProcessor


class _Late(BaseLogger):
    """Builds a logger when it is needed."""

    def __init__(self, build: Callable[[], BaseLogger]) -> None:
        self._build, self._logger = build, BaseLogger()

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if type(self._logger) is BaseLogger:
            self._logger = self._build()
        self._logger.log(metrics, step)

    def close(self) -> None:
        self._logger.close()


class WrittenOnce(MetricsProcessor):
    """Writes the metrics on one replica only. `trainer` is set once the trainer is built."""

    trainer: Any = None
    time_last_log: float

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def _build_metric_logger(self, *, config: Any, parallel_dims: Any, **named: Any) -> BaseLogger:
        # Every rank knows the loss of a committed step, not only those of the last stage.
        config = replace(config, save_for_all_ranks=parallel_dims.pp_enabled)
        build = super()._build_metric_logger
        return _Late(lambda: build(config=config, parallel_dims=parallel_dims, **named))

    def write(
        self, step: int, tokens: int, reading: list[float], loss: float, norm: float, extra: Any
    ) -> None:
        """Write the metrics of a committed step. All replicas call it, with the tokens of this rank in
        committed steps since the last call, and the seconds that its microbatches waited for data."""
        since, self.time_last_log = self.time_last_log, time.perf_counter()

        def act() -> None:
            self.ntokens_since_last_log, self.data_loading_times = tokens, reading or [0.0]
            self.time_last_log = since
            # The largest loss of a rank is unknown: as torchtitan does on one rank, write the mean.
            self.log(step, loss, loss, norm, extra_metrics=extra)

        self.trainer.recovery.on_first(act)

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        recovery = self.trainer.recovery
        recovery.record_heldout_loss(loss)
        recovery.on_first(super().log_validation, loss, step, extra_metrics)
