"""Progress of the trainer that a joining replica receives: it then counts and decides as the others do."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

_NOT_IN_STATE = ("dirpath", "_last_global_step_saved", "_last_checkpoint_saved")  # of ModelCheckpoint


class Progress:
    """An entry of `Step(extra=)`: loops, callbacks, metrics, versions of loggers and the order of the data."""

    differs_between_replicas = True  # a Timer counts its own seconds

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def state_dict(self) -> dict[str, Any]:
        """Called inside a step: the trainer has counted this batch as begun."""
        strategy = self._strategy
        trainer, data = strategy.lightning_module.trainer, strategy.data
        return {
            "loops": {**trainer.fit_loop.state_dict(), "state_dict": {}},
            "callbacks": {each.state_key: each.state_dict() for each in trainer.callbacks},
            "saved": [{name: getattr(each, name) for name in _NOT_IN_STATE} for each in _savers(trainer)],
            "metrics": dict(trainer.callback_metrics) if data else {},
            "should_stop": trainer.should_stop,
            "versions": versions(trainer) if data else [],
            "data": data.state() if data else {},
            "logged": strategy.log.epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called inside `strategy.join`: the trainer has not counted this batch, and is about to."""
        strategy = self._strategy
        trainer, data = strategy.lightning_module.trainer, strategy.data
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        fit.load_state_dict(state["loops"])
        for loop in (fit, epoch, epoch.automatic_optimization, epoch.manual_optimization, epoch.val_loop):
            loop.on_iteration_done()  # it is not restarting
        for part in (epoch.batch_progress.total, epoch.batch_progress.current):
            part.ready, part.started = part.ready - 1, part.started - 1
        steps = epoch.automatic_optimization.optim_progress.optimizer.step
        steps.total.ready, steps.current.ready = steps.total.ready - 1, steps.current.ready - 1
        for callback, saved in zip(_savers(trainer), state["saved"], strict=True):
            for name, value in saved.items():
                setattr(callback, name, value)
        for callback in trainer.callbacks:
            if theirs := state["callbacks"].get(callback.state_key):
                callback.load_state_dict(theirs)
        trainer.callback_metrics.update(state["metrics"])
        trainer.should_stop = state["should_stop"]
        take_versions(trainer, state["versions"])
        for sampler in data.samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(fit.epoch_progress.current.processed)
        data.draw_again(state["data"])
        strategy.log.arrive(state["logged"])


def _savers(trainer: Any) -> list[ModelCheckpoint]:
    return [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint)]


def versions(trainer: Any) -> list[Any]:
    return [getattr(each, "version", None) for each in trainer.loggers]


def take_versions(trainer: Any, versions: list[Any]) -> None:
    """Set the versions of the loggers. A logger counts the directories that it finds, so a successor would begin a new
    version."""
    for logger, version in zip(trainer.loggers, versions, strict=False):
        if hasattr(logger, "_version"):
            logger._version = version
