"""Checkpoints in Lightning's own format, written by one replica. Lightning alone can resume them, and the strategy can
resume checkpoints of Lightning alone."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from recover.integrations.lightning.data import random_state
from recover.world.calls import Call
from recover.world.retry import retry_after_repair

RECOVER = "recover"  # key of the position of the data


def as_lightning_saves(checkpoint: dict[str, Any], global_batch: int, data: Any) -> None:
    """Count batches of the loader instead of steps, and add the position of the data."""
    fit = checkpoint["loops"]["fit_loop"]
    fit["state_dict"].pop("combined_loader", None)
    _scale(fit["epoch_loop.batch_progress"], global_batch, 1)
    if data is not None:
        checkpoint[RECOVER] = {"data": data.state(), "random": random_state()}


def as_steps(checkpoint: dict[str, Any], global_batch: int) -> dict[str, Any] | None:
    """The reverse of `as_lightning_saves`. Returns the position of the data; None for a checkpoint of
    Lightning alone."""
    _scale(checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"], 1, global_batch)
    position: dict[str, Any] | None = checkpoint.pop(RECOVER, None)
    return position


def _scale(progress: dict[str, Any], batches: int, steps: int) -> None:
    """A checkpoint is made while a batch is completed, so the counts of one part may differ by one."""
    for part in (progress["total"], progress["current"]):
        ready = part["ready"]
        if ready * batches % steps:
            raise ValueError(
                f"Lightning on ReCoVer: the checkpoint was made after {ready} batches of an epoch, which is no "
                f"multiple of global_batch={steps}; go on with the one that it was made with"
            )
        part.update({name: ready * batches // steps - (ready - value) for name, value in part.items()})


def write(strategy: Any, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
    """Write a checkpoint on the first living replica, or on the next one if it dies meanwhile. A file under `path` is
    complete."""
    draft, step = path if "://" in path else f"{path}.part", strategy.step

    def act() -> None:
        if not strategy.is_global_zero:
            return
        try:
            strategy.checkpoint_io.save_checkpoint(checkpoint, draft, storage_options)
            if draft != path:
                os.replace(draft, path)
        except Exception as error:
            print(f"recover: {path} could not be saved ({error}); training goes on", flush=True)

    if step is None or not step.index:
        act()
        return
    with step.saving():
        step.confirm()  # a replica whose state differs must not write it
        retry_after_repair(strategy.world, Call.SAVE, act, lambda *_: None)


class StopIfAsked(Callback):
    """Saves after the step and ends the fit, once Ctrl-C or SIGTERM has asked for it."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        strategy = self._strategy
        if strategy.has_stopped or not strategy.step.stop_agreed:  # the same on all replicas
            return
        for saver in [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint)][:1]:
            # Not with pathlib: Lightning also saves to URLs.
            path = os.path.join(saver.dirpath or ".", f"{saver.CHECKPOINT_NAME_LAST}{saver.FILE_EXTENSION}")
            trainer.save_checkpoint(path)
            strategy.once(
                print, f"recover: asked to stop after step {strategy.step.index}; saved {path}", flush=True
            )
        strategy.has_stopped = trainer.should_stop = True
        trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = 0, None
