"""The strategy: one step of `recover.Step` for each batch that the trainer asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

import recover
from recover.integrations.gathering import gather
from recover.integrations.lightning import checkpoints
from recover.integrations.lightning.compatibility import check_lightning, refuse
from recover.integrations.lightning.data import Epochs, StepNumber, Steps
from recover.integrations.lightning.logs import StepLog, write_once
from recover.integrations.lightning.progress import Progress, take_versions, versions
from recover.job.process import rank_on_host
from recover.step.randomness import set_generators
from recover.train.device import pick_device
from recover.world.calls import Call


class RecoverStrategy(Strategy):
    """`Trainer(strategy=RecoverStrategy(global_batch=B))`: every optimizer step on B batches of the DataLoader, over
    all replicas that `recover run` has started, whichever of them die.

    global_batch:    B, microbatches of an optimizer step
    drop_remainder:  leave out the last batches of an epoch that are no whole step; otherwise such an epoch is refused
    seed, options:   of `recover.Step`: policy, reduction, verify, bucket_mb, buffers, skip_limit
    """

    num_nodes, parallel_devices, _layer_sync = 1, None, None  # set by the trainer
    world_size = 1  # the trainer's world is one replica

    def __init__(
        self, global_batch: int, *, drop_remainder: bool = False, seed: int = 0, **options: Any
    ) -> None:
        check_lightning()
        self.world = recover.init()
        super().__init__()
        self.cluster_environment = LightningEnvironment()  # even if another launcher has set variables
        self.global_batch, self._drop, self._seed, self._options = global_batch, drop_remainder, seed, options
        self.step: Any = None
        self.data: Any = None
        self.log = StepLog()
        self.has_stopped = self._is_inside = False  # has_stopped: the fit, on request; _is_inside: a step
        self._begun: tuple[Any, Any] | None = None  # a joining replica's first step, and its first microbatch
        self._resumed: dict[str, Any] | None = None  # the position of the data in a checkpoint
        rank_zero_only.rank = self.global_rank

    @property
    def is_global_zero(self) -> bool:
        return not self.world.outside and self.world.replica == self.world.replicas[0]

    @property
    def global_rank(self) -> int:
        return 0 if self.is_global_zero else max(1, self.world.replica)

    @property
    def local_rank(self) -> int:
        return 0 if self.is_global_zero else rank_on_host()

    @property
    def root_device(self) -> torch.device:
        kind = self.parallel_devices[0].type if self.parallel_devices else "cpu"
        return torch.device("cpu") if kind == "cpu" else pick_device(kind)

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def _every(self, value: Any) -> list[Any]:
        """The value of each replica, the first living one first. Inside a step, before this replica has joined, and
        after an exception: only this replica's own value."""
        if self.world.outside or self._is_inside or self._is_leaving:
            return [value]
        mine = json.dumps(value, default=str).encode()
        return [json.loads(each) for each in gather(self.world, mine, Call.AGREE)]

    @property
    def _is_leaving(self) -> bool:
        """Whether an exception ends the fit of this replica, while others may go on."""
        module = self.lightning_module
        return module is not None and module.trainer.interrupted and len(self.world.replicas) > 1

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of the first living replica, in the types of JSON."""
        return self._every(obj)[0]

    def barrier(self, name: str | None = None) -> None:
        self._every(None)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        every = self._every(bool(decision))
        return False not in every if all else True in every

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return tensor

    def once(self, act: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Call `act` on the first living replica; if it dies meanwhile, on the next one. All replicas call `once`."""
        if self.step is None:
            if self.is_global_zero:
                act(*arguments, **named)
        elif self._is_leaving:
            pass
        elif self._is_inside and not self._begun:
            raise RuntimeError(
                "Lightning on ReCoVer: a logger was called in training_step, which runs for the microbatches of one "
                "replica; use self.log there, or call the logger in on_train_batch_end"
            )
        elif not self.world.outside and not self._begun:  # otherwise the members have called `act`
            self.step.on_first(act, *arguments, **named)

    def setup_environment(self) -> None:
        trainer = self.lightning_module.trainer
        refuse(self, trainer)
        take_versions(trainer, self.broadcast(versions(trainer) if self.is_global_zero else []))
        write_once(trainer.loggers, self.once)
        super().setup_environment()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        try:
            super().setup_optimizers(trainer)
        except RuntimeError:  # several: Lightning's own loop steps one, Step all of them
            module.automatic_optimization = False
            super().setup_optimizers(trainer)
            module.automatic_optimization = True

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        module, optimizer = self.lightning_module, self.optimizers[0]
        if self.world.outside:
            trainer.num_sanity_val_steps = 0
        if not any(isinstance(each, checkpoints.StopIfAsked) for each in trainer.callbacks):
            trainer.callbacks.append(checkpoints.StopIfAsked(self))
        # Lightning calls schedulers, after each step or epoch; joining replicas receive
        # their state.
        schedulers = {f"scheduler {n}": each.scheduler for n, each in enumerate(self.lr_scheduler_configs)}
        self.step = recover.Step(
            self.world,
            module,
            self.optimizers,
            self.global_batch,
            clip=trainer.gradient_clip_val or None,
            seed=self._seed,
            extra={"lightning": Progress(self), **schedulers},
            **self._options,
        )
        optimizer.register_step_pre_hook(lambda *_: self._call("on_before_optimizer_step", optimizer))
        for holder in (module, trainer.datamodule):
            if holder is not None and is_overridden("on_before_batch_transfer", holder):
                holder.on_before_batch_transfer = partial(_unless_number, holder.on_before_batch_transfer)

    def _call(self, hook: str, *arguments: Any) -> None:
        module = self.lightning_module
        for callback in module.trainer.callbacks:
            getattr(callback, hook)(module.trainer, module, *arguments)
        getattr(module, hook)(*arguments)

    def process_dataloader(self, dataloader: Any) -> Any:
        if not self.lightning_module.trainer.training:
            return dataloader
        self.data = Epochs(dataloader, self.global_batch, self._drop, self._seed)
        return Steps(self)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return (
            batch if isinstance(batch, StepNumber) else super().batch_to_device(batch, device, dataloader_idx)
        )

    def begin_epoch(self, drawing: Iterator[Any]) -> None:
        """Draw the order of an epoch, the same on all replicas, or take that of a resumed or running epoch."""
        trainer, step, data = self.lightning_module.trainer, self.step, self.data
        resumed, self._resumed, self.log.epoch = self._resumed, None, {}
        if self.world.outside:
            data.draw(drawing, 0)
            self._join()
            return
        if step.index != trainer.global_step:
            here, index = step.state_dict(), trainer.global_step
            samples = {**here["samples"], "next": index * self.global_batch}
            step.load_state_dict({**here, "index": index, "samples": samples})
        first = step.index * self.global_batch
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if resumed:
            if done:
                data.draw_again({**resumed["data"], "first": first - done * self.global_batch})
            set_generators(resumed["random"], torch.device("cpu"))
            drawing = drawing if done else data.drawing()
        if not (resumed and done):
            data.draw(drawing, first)
        if len(set(self._every(data.digest))) > 1:
            raise RuntimeError(
                "Lightning on ReCoVer: replicas have drawn different orders of the data, because their generators "
                "differ; seed all of them alike, with lightning.seed_everything(...) before the Trainer is made, and "
                "draw random numbers on all replicas or on none (not under trainer.is_global_zero)"
            )

    def _join(self) -> None:
        """Rehearse one microbatch, join, and continue at the position of the members."""
        self._is_inside = True
        loop = self.step.microbatches(self.data)
        self._microbatch(*next(loop))
        self.log.begin()
        with self.log.deferring(self.lightning_module):
            self._begun = loop, next(loop, None)
            self._call("on_train_epoch_start")

    def training_step(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Take a whole step: the optimizer has been called when this returns."""
        module, step = self.lightning_module, self.step
        if not isinstance(args[0], StepNumber):
            raise ValueError(
                "Lightning on ReCoVer: training_step was given several data loaders; give one DataLoader"
            )
        if self._begun is None:
            self.log.begin()
            loop = step.microbatches(self.data)
            batch = next(loop, None)
        else:
            (loop, batch), self._begun = self._begun, None
        self._is_inside, more = True, dict[str, Any]()
        while batch is not None:
            more = self._microbatch(*batch)
            batch = next(loop, None)
        self._is_inside = False
        rank_zero_only.rank = self.global_rank
        progress = module.trainer.fit_loop.epoch_loop.batch_progress
        progress.is_last_batch = progress.current.ready >= module.trainer.num_training_batches
        mine = self.log.mine(number - self.data.first for number in step.samples)
        every = gather(self.world, mine, Call.AGREE)
        self.log.write(module.log, every, step.loss, len(step.all_samples))
        return {**more, "loss": torch.tensor(step.loss, device=self.root_device)}

    def _microbatch(self, number: int, batch: Any) -> dict[str, Any]:
        """Forward and backward of one microbatch. Returns the outputs of the module's training_step as a dict."""
        module = self.lightning_module
        batch = self.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = super().batch_to_device(batch)
        with self.step.own_backward() as record, self.log.collecting(module, number, batch):
            takes_number = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
            output = super().training_step(*((batch, number) if takes_number else (batch,)))
            outputs = output if isinstance(output, dict) else {"loss": output}
            if not isinstance(loss := outputs.get("loss"), torch.Tensor):
                raise TypeError(
                    f"training_step returned {output!r} for a microbatch, and a step is taken on all of them; return "
                    "the loss, which may be 0 * loss"
                )
            overlaps = not self._uses_gradients()
            if overlaps:
                record(loss, before_last_pass=True)
            super().backward(loss, None)
            if not overlaps:
                record(loss)
        self.log.losses[number] = loss.detach()
        return outputs

    def _uses_gradients(self) -> bool:
        """Whether user code runs backward passes itself, or looks at `.grad` after them."""
        module = self.lightning_module
        own = is_overridden("backward", module) or is_overridden("on_after_backward", module)
        return own or any(is_overridden("on_after_backward", each) for each in module.trainer.callbacks)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return closure_loss  # done, for each microbatch

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        return closure()  # Step calls the optimizers

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        # After a stop the last step is saved, and its epoch is not over.
        if not self.has_stopped and not self._is_leaving:
            checkpoints.as_lightning_saves(checkpoint, self.global_batch, self.data)
            checkpoints.write(self, checkpoint, str(filepath), storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        if not self.has_stopped:
            self.once(self.checkpoint_io.remove_checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._resumed = checkpoints.as_steps(checkpoint, self.global_batch)
            if self.world.outside:  # the members have its progress
                self._resumed = None
                checkpoint = {key: checkpoint[key] for key in checkpoint if key not in ("loops", "callbacks")}
        return checkpoint


def _unless_number(hook: Callable[..., Any], batch: Any, dataloader_idx: int) -> Any:
    return batch if isinstance(batch, StepNumber) else hook(batch, dataloader_idx)
