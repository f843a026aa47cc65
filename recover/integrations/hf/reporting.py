"""Callbacks: those of the user run on every replica, as in any distributed run of the trainer; those
that report (progress bars, TensorBoard, W&B) run on the first living replica only. After its
death its successor begins them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from transformers.trainer_callback import (
    CallbackHandler,
    ExportableState,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)

# Kept until all replicas know that they were reported; the others only draw progress bars.
KEPT = {"on_train_begin", "on_log", "on_evaluate", "on_predict", "on_save", "on_train_end"}


def is_reporter(callback: TrainerCallback) -> bool:
    return isinstance(callback, PrinterCallback | ProgressCallback) or any(
        kind.__module__.startswith("transformers.integrations.") for kind in type(callback).__mro__
    )


class Callbacks:
    """Takes the place of `call_event` of the trainer's `CallbackHandler`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._handler = trainer, trainer.callback_handler
        self._has_begun = False  # whether this replica has called on_train_begin of the reporters
        self._was_first = trainer.is_world_process_zero()

    def call_event(self, event: str, args: Any, state: Any, control: Any, **named: Any) -> Any:
        trainer, callbacks = self._trainer, self._handler.callbacks
        first = state.is_world_process_zero = state.is_local_process_zero = trainer.is_world_process_zero()
        if first and not self._was_first and trainer.is_in_train and event != "on_train_begin":
            # A callback that opens files on the first process only must open them on this replica now.
            plain = [each for each in self._others() if not isinstance(each, ExportableState)]
            self._call(plain, "on_train_begin", args, state, copy.copy(control))
        self._was_first = first
        if any(map(is_reporter, callbacks)):
            kept = {name: dict(value) if isinstance(value, dict) else value for name, value in named.items()}
            report = partial(self._report, event, args, copy.copy(state), copy.copy(control), kept)
            if event in KEPT and trainer.recovery is not None:
                trainer.recovery.on_first(report)
            elif first:
                report()
        return self._call(self._others(), event, args, state, control, **named)

    def _others(self) -> list[TrainerCallback]:
        return [each for each in self._handler.callbacks if not is_reporter(each)]

    def _report(self, event: str, args: Any, state: Any, control: Any, named: dict[str, Any]) -> None:
        """Call the reporters, on the first living replica. `state` and `control` are copies from the time of the
        event."""
        state.is_world_process_zero = state.is_local_process_zero = True
        reporters = [each for each in self._handler.callbacks if is_reporter(each)]
        if not self._has_begun and self._trainer.is_in_train:
            self._has_begun = True
            self._call(reporters, "on_train_begin", args, state, control)
        if event != "on_train_begin":
            self._call(reporters, event, args, state, control, **named)
        self._has_begun = self._has_begun and event != "on_train_end"

    def _call(self, callbacks: list[TrainerCallback], event: str, *given: Any, **named: Any) -> Any:
        handler = copy.copy(self._handler)
        handler.callbacks = callbacks
        return CallbackHandler.call_event(handler, event, *given, **named)
