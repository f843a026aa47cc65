"""Checks of the adapter: methods of the trainer that it relies on, and settings that it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from accelerate import PartialState
from transformers.trainer_callback import CallbackHandler
from transformers.utils import logging

from recover.checkpoint.object_storage import is_url
from recover.integrations.checks import broken_rules, check_signatures
from recover.job.process import rank_on_host
from recover.world.world import World

logger = logging.get_logger("recover.integrations.hf")

TESTED = ("5.22.2",)
# Parameters of each method that is overridden, replaced or called with all of its arguments.
SIGNATURES = dict(
    line.split(" ", 1)
    for line in """
train self resume_from_checkpoint trial ignore_keys_for_eval
get_train_dataloader self
_init_training_state self max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial
_prepare_for_training self max_steps train_dataloader resume_from_checkpoint
_run_epoch self model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval \
start_time resume_from_checkpoint epochs_trained steps_trained_in_current_epoch
get_batch_samples self epoch_iterator num_batches device
training_step self model inputs num_items_in_batch
compute_loss self model inputs return_outputs num_items_in_batch
_get_num_items_in_batch self batch_samples device
floating_point_ops self inputs
_track_num_input_tokens self inputs
_clip_grad_norm self model
_get_grad_norm self model grad_norm
_get_learning_rate self
_maybe_log_save_evaluate self tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate
_evaluate self trial ignore_keys_for_eval skip_scheduler
log self logs start_time
_get_output_dir self trial
_save_checkpoint self model trial
_load_rng_state self checkpoint
save_model self output_dir _internal_call
push_to_hub self commit_message blocking token revision kwargs
_push_from_checkpoint self checkpoint_folder
_finalize_training self trial num_train_samples start_time
is_world_process_zero self
is_local_process_zero self
""".strip().splitlines()
)
# Methods that are the loop: a trainer with its own loop, or its own batches, cannot be adapted.
LOOP = (
    "_inner_training_loop",
    "_run_epoch",
    "_init_training_state",
    "_prepare_for_training",
    "get_batch_samples",
)

# Setting and its allowed values | why no other | remedy
RULES = """
fp16 False | a scaled gradient would be applied unscaled | set bf16=True instead
fsdp False,None,[], | replicas of several GPUs are not supported here | leave fsdp out, or use torchtitan with FSDP2 (docs/guides/torchtitan.md)
deepspeed None | DeepSpeed has its own optimizer and its own process groups | leave it out
parallelism_config None | a replica is one rank here | leave it out
auto_find_batch_size False | replicas would find different sizes | set per_device_train_batch_size
enable_jit_checkpoint False | SIGTERM is handled by `recover run`: it saves, and ends the job | leave it out
save_on_each_node False | one replica writes | leave it out
"""  # noqa: E501
LOCAL = "give a directory, and copy its checkpoints to object storage, or push them to the Hub (push_to_hub)"
OPTIMIZERS = ("lomo", "layerwise", "schedule_free")  # update parameters outside of optimizer.step()


def check_trainer(kind: type[transformers.Trainer]) -> None:
    """Raise if a method has other parameters than the adapter was written for, or if the class has a
    loop of its own; warn of an untested version."""
    check_signatures(
        "transformers",
        TESTED,
        {
            transformers.Trainer: SIGNATURES,
            CallbackHandler: {"call_event": "self event args state control kwargs"},
        },
        "recover.integrations.hf",
        logger.warning,
    )
    for name in LOOP:
        if getattr(kind, name) is not getattr(transformers.Trainer, name):
            raise TypeError(
                f"{kind.__qualname__} has its own {name}, and ReCoVer needs that of transformers.Trainer; override "
                "compute_loss or training_step instead"
            )


def refuse(args: transformers.TrainingArguments, world: World) -> None:
    """Raise ValueError for settings that cannot work."""
    for why in obstacles(args, world.grid.replica_size):
        raise ValueError(f"transformers.Trainer on ReCoVer: {why}")


def obstacles(args: Any, replica_size: int) -> Iterator[str]:
    """Cause, value and remedy of each setting that cannot work."""
    yield from broken_rules(args, RULES)
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(word in optimizer for word in OPTIMIZERS):
        yield f"it changes parameters outside of optimizer.step() (optim is {optimizer}); use adamw_torch"
    if is_url(args.output_dir):
        yield f"the trainer saves to a local directory (output_dir is {args.output_dir}); {LOCAL}"
    if args.accelerator_config.dispatch_batches or args.accelerator_config.split_batches:
        yield "replicas read their own microbatches (accelerator_config dispatches or splits batches); leave it out"
    if args.world_size > 1:
        yield f"the trainer's world is one replica (its world_size is {args.world_size}); start with `recover run`"
    if replica_size > 1:
        yield f"a replica is one rank here (--replica-size is {replica_size}); leave --replica-size out"


def take_own_gpu(args: Any) -> None:
    """The trainer would take all GPUs of the host for one process: give it that of this rank."""
    if args.device.type == "cuda":
        device = torch.device("cuda", rank_on_host() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        args.__dict__["_setup_devices"], args._n_gpu, PartialState().device = device, 1, device
