"""`transformers.Trainer` on ReCoVer: each step on exactly B microbatches, whichever replicas die.

The loop of the trainer is unchanged. It iterates over B placeholders in each step. The last placeholder
runs the whole step: `recover.Step` assigns microbatches to replicas, and calls optimizer and scheduler.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, ClassVar

import torch
import transformers
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import GreedyLR
from transformers.trainer_callback import ExportableState, TrainerControl
from transformers.trainer_utils import SaveStrategy

import recover
from recover.checkpoint.object_storage import is_url
from recover.integrations.gathering import gather
from recover.integrations.hf.checkpoints import SavesOnce
from recover.integrations.hf.compatibility import check_trainer, refuse, take_own_gpu
from recover.integrations.hf.data import stream_of
from recover.integrations.hf.reporting import Callbacks
from recover.integrations.loggers import name_wandb_run
from recover.world.calls import Call

# Fields of TrainerState that a replica does not take from another one.
OWN = {"is_local_process_zero", "is_world_process_zero", "stateful_callbacks"}
# Attributes of the trainer that its loop changes, and of TRL's trainers.
LOOP = ["_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos"]
LOOP += ["_initial_num_input_tokens_seen", "_total_train_tokens"]
FLAGS = tuple(TrainerControl.__dataclass_fields__)
_adapted: dict[type, type] = {}

_Trainer: Any = object  # `recoverable` combines `Recoverable` with a subclass of transformers.Trainer


class _Called:
    """A scheduler whose `step` does nothing: `recover.Step` has called it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["scheduler"], name)


def _has_stepped(optimizer: Any) -> None:
    """Replace `step` of accelerate's wrapper by a function that does nothing: `recover.Step` calls the optimizer inside
    the wrapper. Schedulers read the two attributes."""

    def step(closure: Any = None) -> None:
        pass

    step._wrapped_by_lr_sched = optimizer._opt_called = True  # type: ignore[attr-defined]
    optimizer.step = step


class Recoverable(SavesOnce, _Trainer):
    """Mixin that puts a subclass of `transformers.Trainer` on ReCoVer. `recovery` is the `recover.Step` over all
    replicas, once training has begun.

    step_options: further arguments of `recover.Step`, such as {"reduction": "reproducible"}
    """

    step_options: ClassVar[dict[str, Any]] = {}
    recovery: Any = None
    lr_scheduler: Any

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if "training_step" in cls.__dict__:
            raise TypeError(
                f"{cls.__qualname__} overrides training_step of a trainer on ReCoVer, which takes whole steps; derive "
                f"it from transformers.Trainer, and use recoverable({cls.__name__}), which calls it for each microbatch"
            )

    def __init__(self, *args: Any, **named: Any) -> None:
        self.world = recover.init()
        given = named.get("args", args[1] if len(args) > 1 else None)
        if given is not None:
            refuse(given, self.world)
            take_own_gpu(given)
        name_wandb_run(self.world)
        self._left = 0  # placeholders of the step in progress
        self._catches_up = False  # a joined replica whose loop has not come to the step that it joined in
        self._has_stopped = False
        self._counts: dict[int, dict[str, Any]] | None = None  # of a step, until all replicas have them
        super().__init__(*args, **named)
        refuse(self.args, self.world)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or self.accelerator.scaler is not None:
            raise ValueError(
                "transformers.Trainer on ReCoVer: variables of accelerate (ACCELERATE_USE_FSDP, "
                "ACCELERATE_USE_DEEPSPEED, ACCELERATE_MIXED_PRECISION) ask for FSDP, DeepSpeed or fp16; unset them, "
                "and set bf16=True"
            )
        self.callback_handler.call_event = Callbacks(self).call_event

    def is_world_process_zero(self) -> bool:
        return not self.world.outside and self.world.replica == self.world.replicas[0]

    is_local_process_zero = is_world_process_zero

    # Before the first step

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **named: Any) -> Any:
        if named.get("trial") or (args and args[0]):
            raise ValueError(
                "transformers.Trainer on ReCoVer: a search of hyperparameters is several runs in one job; start a job "
                "for each trial"
            )
        if is_url(resume_from_checkpoint):
            raise ValueError(
                "transformers.Trainer on ReCoVer: the trainer resumes from a local directory (resume_from_checkpoint "
                f"is {resume_from_checkpoint}); copy the checkpoint to one"
            )
        # A joining replica receives the state of the members.
        return super().train(None if self.world.outside else resume_from_checkpoint, *args, **named)

    def get_train_dataloader(self) -> Any:
        self._loader = super().get_train_dataloader()
        return self._loader

    def _init_training_state(
        self, max_steps: Any, num_update_steps_per_epoch: Any, num_train_epochs: Any, resume: Any, trial: Any
    ) -> Any:
        done = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial
        )
        batch, args = self.args.gradient_accumulation_steps, self.args
        self._stream = stream_of(self._loader, batch, args.seed, args.dataloader_num_workers)
        self._stream.begin(0, 0, torch.get_rng_state())  # for the rehearsal of a joining replica
        self._prepared = super()._prepare_for_training(max_steps, self._loader, resume)
        self._make_step(batch)
        self._resume(resume)
        if not self.world.outside:
            return done
        self._take_step(self._prepared[0])
        self._catches_up = True
        place = self._stream.place
        return place["epoch"], (self.recovery.index - 1 - place["first"]) * batch

    def _prepare_for_training(self, *_: Any, **__: Any) -> Any:
        return self._prepared

    def _make_step(self, batch: int) -> None:
        scheduler: Any = self.lr_scheduler
        clip = self.args.max_grad_norm
        extra: dict[str, Any] = {"huggingface": _Progress(self)}
        by_metric = isinstance(scheduler, ReduceLROnPlateau | GreedyLR)  # called by the trainer
        if by_metric:
            extra["scheduler"] = scheduler
        else:
            self.lr_scheduler = _Called(scheduler)
        self.recovery = recover.Step(
            self.world,
            self.model,
            self.optimizer.optimizer,
            batch,
            clip=clip if clip and clip > 0 else None,
            scheduler=None if by_metric else scheduler,
            seed=self.args.seed,
            extra=extra,
            **self.step_options,
        )
        _has_stepped(self.optimizer)
        self.accelerator.backward = self._backward
        self.recovery.stop_agreed  # noqa: B018 (from now on the first Ctrl-C stops after a step)
        if self.is_world_process_zero():
            print(
                f"recover: gradient_accumulation_steps={batch} is the number of microbatches of a step over all "
                f"replicas ({batch} x {self._train_batch_size} examples), however many replicas live",
                flush=True,
            )

    def _load_rng_state(self, checkpoint: Any) -> None:
        if not self._catches_up:
            super()._load_rng_state(checkpoint)

    def _evaluate(self, *args: Any, **named: Any) -> Any:
        if self._catches_up:
            return {}  # eval_on_start
        metrics = super()._evaluate(*args, **named)
        self._agree()
        return metrics

    # Steps

    def _run_epoch(self, **named: Any) -> None:
        if self._catches_up:
            named["resume_from_checkpoint"] = "the members"  # skips what is done of the epoch
        else:
            has_begun = named["resume_from_checkpoint"] and named["epoch"] == named["epochs_trained"]
            done = named["steps_trained_in_current_epoch"] if has_begun else 0
            first = self.recovery.index - done // self.args.gradient_accumulation_steps
            self._begin_epoch(named["epoch"], first, self._order_of(named["epoch"]) if has_begun else None)
        super()._run_epoch(**named)

    def _begin_epoch(self, epoch: int, first: int, generator: torch.Tensor | None) -> None:
        """Draw the order of an epoch from the generator of the first replica: a callback may have drawn on one
        replica alone."""
        if generator is None:
            state = self._exchange("the start of an epoch", torch.get_rng_state().tolist())[0]
            torch.set_rng_state(torch.tensor(state, dtype=torch.uint8))
        self._stream.begin(epoch, first, generator)
        if len(set(self._exchange("the order of an epoch", self._stream.digest))) > 1:
            raise RuntimeError(
                f"transformers.Trainer on ReCoVer: replicas have drawn different orders of epoch {epoch}, although "
                "torch's generators are alike; let the sampler draw from torch's generator, or from its epoch"
            )

    def _exchange(self, what: str, mine: Any) -> list[Any]:
        """The value of each replica, the first living one first. All replicas must make the same call: it raises
        RuntimeError where their `what` differs."""
        row = json.dumps([what, mine]).encode()
        rows = [json.loads(each) for each in gather(self.world, row, Call.AGREE)]
        if len(found := sorted({row[0] for row in rows})) > 1:
            raise RuntimeError(
                f"transformers.Trainer on ReCoVer: all replicas must make the same calls of the trainer, and some are "
                f"in {found[0]}, others in {found[1]}; leave out `if trainer.is_world_process_zero()` and "
                "`if state.is_world_process_zero` around calls of the trainer (the first replica writes)"
            )
        return [row[1] for row in rows]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        self._left = num_batches
        return [{}] * num_batches, None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Called by the trainer for each placeholder; runs the step at the last one."""
        self._left -= 1
        if self._left:
            return torch.zeros((), device=self.args.device)
        if self._catches_up:
            self._catches_up = False
            self._progress_at_join.apply()
        else:
            self._take_step(model)
        return torch.tensor(self.recovery.loss, device=self.args.device)

    def _take_step(self, model: Any) -> None:
        found: dict[int, dict[str, Any]] = {}
        self._rate = super()._get_learning_rate()
        for number, batch in self.recovery.microbatches(self._stream):
            self._rate = super()._get_learning_rate()  # a joining replica has received it by now
            if batch is None:
                with self.recovery.own_backward(weight=0) as record:
                    record(torch.zeros((), device=self.args.device))
                found[number] = {}
            else:
                found[number] = self._count(model, number, batch, runs=True)
        self._counts = {number: found[number] for number in self.recovery.samples}

    def _run_microbatch(self, model: Any, number: int, batch: Any) -> None:
        """Forward and backward of one microbatch. The loss of a step is the mean over all items (tokens) if the trainer
        divides by their number, and the mean over all microbatches otherwise."""
        items = self._get_num_items_in_batch([batch], self.args.device)
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = self.compute_loss_func is not None or (
                self.model_accepts_loss_kwargs and items is not None
            )
        self._weight, self._factor = 1.0, 1
        if is_scaled and items is not None:
            self._weight = float(items)
        elif is_scaled:  # the trainer takes the sum over microbatches
            self._factor = self._stream.filled(number // self.args.gradient_accumulation_steps)
        self.current_gradient_accumulation_steps = 1
        least = None if items is None else torch.as_tensor(items).clamp(min=1)  # a loss of 0/0 is not 0
        super().training_step(model, batch, least)

    def _backward(self, loss: torch.Tensor, **_: Any) -> None:
        self.recovery.backward(loss * self._factor if self._factor > 1 else loss, weight=self._weight)

    def _clip_grad_norm(self, model: Any) -> Any:
        return None

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
        return float(self.recovery.grad_norm)

    def _get_learning_rate(self) -> float:
        """The rate of the last step: the scheduler is one step ahead already."""
        return self._rate if self.is_in_train and self.recovery is not None else super()._get_learning_rate()

    # Counters and decisions, the same on all replicas

    def floating_point_ops(self, inputs: Any) -> int:
        return super().floating_point_ops(inputs) if inputs else 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if inputs:
            super()._track_num_input_tokens(inputs)

    def _count(self, model: Any, number: int, batch: Any, runs: bool) -> dict[str, Any]:
        """Run a microbatch if `runs`, and return what it adds to counters and metrics. They stay unchanged here: a
        microbatch counts only if its step commits with it."""
        metrics = getattr(self, "_metrics", {}).get("train", {})  # of TRL
        before = {name: len(values) for name, values in metrics.items()}
        seen, trained = self.state.num_input_tokens_seen, getattr(self, "_total_train_tokens", 0)
        if runs:
            self._run_microbatch(model, number, batch)
        elif metrics:
            with torch.no_grad(), torch.random.fork_rng():
                self.compute_loss(self.model, self._prepare_inputs(batch))
        self._track_num_input_tokens(batch)
        found = {
            "flos": float(self.floating_point_ops(batch)),
            "seen": self.state.num_input_tokens_seen - seen,
            "trained": getattr(self, "_total_train_tokens", 0) - trained,
            "metrics": {name: values[before.get(name, 0) :] for name, values in metrics.items()},
        }
        self.state.num_input_tokens_seen, self._total_train_tokens = seen, trained
        for name, values in metrics.items():
            del values[before.get(name, 0) :]
        return found

    def _agree(self) -> None:
        """Give all replicas the counts of the last step, and set on all of them each control flag that one has set."""
        control = self.control
        if self.recovery.stop_agreed and not self._has_stopped:
            self._has_stopped = control.should_training_stop = True
            control.should_save = self.args.save_strategy != SaveStrategy.NO
        mine = {"flags": [name for name in FLAGS if getattr(control, name)], "counts": self._counts or {}}
        rows = self._exchange("the end of a step", mine)
        for name in {name for row in rows for name in row["flags"]}:
            setattr(control, name, True)
        counts = {int(number): count for row in rows for number, count in row["counts"].items()}
        for number in () if self._counts is None else set(self.recovery.all_samples) - counts.keys():
            batch = self._stream[number][1]  # its replica has died since its sums were taken
            counts[number] = self._count(None, number, batch, runs=False) if batch is not None else {}
        self._counts = None
        metrics = getattr(self, "_metrics", {}).get("train", {})
        for _, count in sorted(counts.items()):
            self.current_flos += count.get("flos", 0)
            self.state.num_input_tokens_seen += count.get("seen", 0)
            self._total_train_tokens += count.get("trained", 0)
            for name, values in count.get("metrics", {}).items():
                metrics[name].extend(values)
        if "num_tokens" in metrics:
            metrics["num_tokens"] = [self._total_train_tokens]

    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        self._agree()
        saves = self._saves
        super()._maybe_log_save_evaluate(*args, **named)
        if self._saves > saves:
            self._agree()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """All replicas log the values of the first one: times differ, and metrics may."""
        if self.recovery is not None:
            self.recovery.refuse_inside_step("trainer.log")  # replicas compute different microbatches
        if not self.world.outside:
            known = {name: value for name, value in logs.items() if isinstance(value, int | float | str)}
            logs.update(self._exchange("trainer.log", known)[0])
        if self.recovery is not None and "eval_loss" in logs:
            self.recovery.record_heldout_loss(logs["eval_loss"])
        super().log(logs, start_time)
        if self.is_in_train and not self._catches_up:
            self._agree()  # callbacks may have decided something; as after an evaluation and a checkpoint

    def _finalize_training(self, *args: Any, **named: Any) -> Any:
        self.recovery.confirm()
        limit = self.args.save_total_limit
        if not self.is_world_process_zero():
            self.args.save_total_limit = None  # the first replica removes checkpoints
        output = super()._finalize_training(*args, **named)
        self.args.save_total_limit = limit
        return output


class _Progress:
    """State of the trainer that a joining replica receives: its counters, and those of its callbacks."""

    differs_between_replicas = True  # callbacks of the user may have times

    def __init__(self, trainer: Any) -> None:
        self._trainer, trainer._progress_at_join = trainer, self
        self._received: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {name: value for name, value in asdict(trainer.state).items() if name not in OWN}
        return {
            "state": state,
            "control": {name: getattr(trainer.control, name) for name in FLAGS},
            "callbacks": [[type(each).__name__, each.state()["attributes"]] for each in self._exportable()],
            "loop": {name: getattr(trainer, name) for name in LOOP if hasattr(trainer, name)},
            "loss": float(getattr(trainer, "_tr_loss", 0.0)),  # of steps since the last log
            "metrics": dict(getattr(trainer, "_metrics", {}).get("train", {})),
            "data": trainer._stream.place,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._received = state
        self.apply()
        self._trainer._stream.begin(**state["data"])

    def apply(self) -> None:
        """Set the received state: at the join, and again when the loop of the trainer, which resets some of it, has
        reached this step."""
        trainer, received = self._trainer, self._received
        for owner, name in ((trainer.state, "state"), (trainer.control, "control"), (trainer, "loop")):
            for key, value in received[name].items():
                setattr(owner, key, value)
        trainer._tr_loss = torch.tensor(received["loss"], device=trainer.args.device)
        for callback, (name, attributes) in zip(self._exportable(), received["callbacks"], strict=False):
            if type(callback).__name__ == name:
                for key, value in attributes.items():
                    setattr(callback, key, value)
        if received["metrics"]:
            trainer._metrics["train"].update(received["metrics"])

    def _exportable(self) -> list[Any]:
        return [
            each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)
        ]


def recoverable(kind: type[transformers.Trainer]) -> Any:
    """Return a subclass of `kind` that trains on ReCoVer. `kind`: `transformers.Trainer` or a subclass of it (TRL's,
    or your own)."""
    if kind not in _adapted:
        check_trainer(kind)
        _adapted[kind] = type(kind.__name__, (Recoverable, kind), {"__module__": kind.__module__})
    return _adapted[kind]


Trainer = recoverable(transformers.Trainer)
