"""Checks of the adapter: methods of Lightning that it relies on, and settings that it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden

from recover.integrations.checks import check_signatures

TESTED = ("2.6.6",)
# Parameters of each method that is overridden or called with all of its arguments.
SIGNATURES = dict(
    line.split(" ", 1)
    for line in """
setup_environment self
setup_optimizers self trainer
setup self trainer
process_dataloader self dataloader
batch_to_device self batch device dataloader_idx
training_step self args kwargs
backward self closure_loss optimizer args kwargs
optimizer_step self optimizer closure model kwargs
save_checkpoint self checkpoint filepath storage_options
load_checkpoint self checkpoint_path weights_only
remove_checkpoint self filepath
reduce self tensor group reduce_op
barrier self name
broadcast self obj src
all_gather self tensor group sync_grads
reduce_boolean_decision self decision all
model_to_device self
""".strip().splitlines()
)
# Callbacks that take steps, accumulate or keep weights by themselves: joining replicas would not have that state.
REFUSED_CALLBACKS = (
    callbacks.BatchSizeFinder,
    callbacks.GradientAccumulationScheduler,
    callbacks.LearningRateFinder,
    callbacks.StochasticWeightAveraging,
    callbacks.WeightAveraging,
)


def check_lightning() -> None:
    """Raise if a method has other parameters than the adapter was written for; warn of an untested version."""
    check_signatures(
        "lightning", TESTED, {Strategy: SIGNATURES}, "recover.integrations.lightning", rank_zero_warn
    )


def refuse(strategy: Any, trainer: pl.Trainer) -> None:
    """Raise ValueError for settings that cannot work."""
    for why in (*_refused_settings(strategy, trainer), *_refused_code(trainer, trainer.lightning_module)):
        raise ValueError(f"Lightning on ReCoVer: {why}")


def _refused_settings(strategy: Any, trainer: pl.Trainer) -> Iterator[str]:
    """Cause, value and remedy of each setting that cannot work."""
    if (count := len(strategy.parallel_devices or [])) > 1:
        yield f"a replica is one device (devices is {count}); set devices=1, `recover run -n {count}` starts more"
    if strategy.num_nodes > 1:
        yield (
            f"`recover run --nnodes` starts the hosts (num_nodes is {strategy.num_nodes}); leave num_nodes out"
        )
    if (size := strategy.world.grid.replica_size) > 1:
        yield f"a replica is one process (--replica-size is {size}); leave --replica-size out"
    if (batches := trainer.accumulate_grad_batches) != 1:
        yield (
            f"a step accumulates the microbatches of all replicas (accumulate_grad_batches is {batches}); leave it "
            f"out, and give RecoverStrategy(global_batch=...): {batches} times the processes that you had"
        )
    if "value" in str(getattr(trainer.gradient_clip_algorithm, "value", "")):
        yield 'gradients are clipped by their norm (gradient_clip_algorithm is "value"); set it to "norm"'
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        yield 'there is no gradient scaler (precision is "16-mixed"); set precision="bf16-mixed"'
    if strategy._layer_sync is not None:
        yield "a microbatch has statistics of its own (sync_batchnorm is True); leave sync_batchnorm out"
    if every := trainer.reload_dataloaders_every_n_epochs:
        yield f"joining replicas have one data loader (reload_dataloaders_every_n_epochs is {every}); leave it out"
    if (seconds := getattr(trainer, "_val_check_time_interval", None)) is not None:
        yield f"clocks of replicas differ (val_check_interval is {seconds:g} seconds); give a number of steps"
    if isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
        yield "a checkpoint must be complete before training goes on (AsyncCheckpointIO is given); leave it out"


def _refused_code(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[str]:
    """Cause, value and remedy of each method of the module, and of each callback, that cannot work."""
    if not module.automatic_optimization:
        yield (
            "manual optimization steps before replicas agree (automatic_optimization is False); return the loss from "
            "training_step, or use recover.Step in a loop of your own (docs/guides/porting.md)"
        )
    if is_overridden("optimizer_step", module):
        yield (
            "Step calls the optimizers when all replicas have agreed (optimizer_step is overridden); set rates by a "
            "scheduler, or use recover.Step in a loop of your own (docs/guides/porting.md)"
        )
    if is_overridden("configure_gradient_clipping", module):
        yield "Step clips (configure_gradient_clipping is overridden); use Trainer(gradient_clip_val=...)"
    for callback in trainer.callbacks:
        if isinstance(callback, REFUSED_CALLBACKS):
            yield f"callbacks has {type(callback).__name__}, whose state replicas do not share; leave it out"
