"""Checks of the adapter: signatures of torchtitan that it relies on, and configs that it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from math import prod
from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from recover.integrations.checks import broken_rules, check_signatures

TESTED = ("0.3.0",)
# Parameters of each function that is overridden, replaced or called with all of its arguments.
SIGNATURES: dict[Any, dict[str, str]] = {
    Trainer: {
        "__init__": "self config",
        "init_distributed": "self",
        "forward_backward_step": "self input_dict labels global_valid_tokens",
        "train_step": "self data_iterator",
        "train": "self",
        "should_continue_training": "self",
        "state_dict": "self",
        "load_state_dict": "self state_dict",
    },
    CheckpointManager: {
        "_should_save": "self curr_step last_step",
        "_save": "self curr_step last_step",
        "_load": "self step",
        "dcp_load": "self state_dict checkpoint_id from_hf from_quantized",
    },
    MetricsProcessor: {
        "_build_metric_logger": "self config parallel_dims dump_folder pp_schedule ft_enable ft_replica_id "
        "config_dict tag",
        "log": "self step global_avg_loss global_max_loss grad_norm extra_metrics",
        "log_validation": "self loss step extra_metrics",
    },
    ParallelAwareDataloader: {"state_dict": "self", "load_state_dict": "self state_dict"},
    dist_utils: {"set_pg_timeouts": "timeout parallel_dims"},
}

# Setting and its allowed value | why no other | remedy
RULES = """
training.disable_cuda_graphs True | CUDA graphs replay steps without gradient hooks | set --training.disable-cuda-graphs
parallelism.data_parallel_replicate_degree 1 | replicas in a replica are lost together | `recover run` makes replicas
training.enable_cpu_offload False | offloaded gradients are not where replicas are summed | leave it out
comm.mode default | ranks are real processes | leave --comm.mode out
checkpoint.create_seed_checkpoint False | one process makes a seed | make it with torchtitan alone, under torchrun
metrics.save_for_all_ranks False | metrics are those of all replicas, written once | leave it out
recover.samples exact | one loader for each slot has the position of the data | leave --recover.samples out
dataloader.infinite True | slots would run out of data in different steps | limit --training.steps instead
"""


def converted(kind: Any, config: Any) -> Any:
    """The same config as an instance of `kind`, a subclass of its class."""
    return kind(**{each.name: getattr(config, each.name) for each in fields(config)})


def check_torchtitan() -> None:
    """Raise if a function has other parameters than the adapter was written for; warn of an
    untested version."""
    check_signatures("torchtitan", TESTED, SIGNATURES, "recover.integrations.titan", logger.warning)


def refuse(config: Any, replica_size: int) -> None:
    """Raise ValueError for a config that cannot work."""
    for why in obstacles(config, replica_size):
        raise ValueError(f"torchtitan on ReCoVer: {why}")


def obstacles(config: Any, size: int) -> Iterator[str]:
    """Cause, value and remedy of each setting that cannot work."""
    yield from broken_rules(config, RULES)
    training, parallel, checkpoint = config.training, config.parallelism, config.checkpoint
    if training.global_batch_size < 1:
        yield (
            "the batch must not follow from the number of replicas, which changes (training.global_batch_size is "
            f"{training.global_batch_size}); set --training.global-batch-size to the sequences of a step"
        )
    if (verify := config.recover.verify) and config.compile.enable:
        where = f"recover.verify is {verify}, and compile.enable is True"
        yield f"ranks may compile to kernels with other bits ({where}); leave --compile.enable out"
    if checkpoint.enable and not isinstance(checkpoint, CheckpointManager.Config):
        kind = type(checkpoint).__qualname__
        yield f"one replica writes, with torchtitan's DCP manager (checkpoint is {kind}); use CheckpointManager.Config"
    names = ("data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel")
    degrees = {name: getattr(parallel, f"{name}_degree") for name in names}
    ranks = prod(max(degree, 1) for degree in degrees.values())
    if size % ranks or (degrees[names[0]] > 0 and ranks != size):
        yield (
            f"a replica has {size} rank(s), and its parallel degrees need {ranks} ({degrees}); start with "
            f"`recover run --replica-size {ranks}`, or change --parallelism"
        )
