"""Trains as `python -m torchtitan.train`, on a CPU. Writes the logged values and final parameters to TITAN_OUT."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import titan_on_cpu  # noqa: F401  (before torchtitan)
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger

from recover.step.joining.instalments import InstalmentSize

OUT = Path(os.environ["TITAN_OUT"])
OUT.mkdir(parents=True, exist_ok=True)
_log, _validation, _finish = MetricsProcessor.log, MetricsProcessor.log_validation, FileSystemWriter.finish


def write(line: dict[str, Any]) -> None:
    with open(OUT / f"metrics-{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


@functools.wraps(_log)
def log(self: Any, step: int, loss: float, largest: float, norm: float, extra_metrics: Any = None) -> None:
    if dist.get_rank() == 0:  # torchtitan alone logs on all ranks
        write({"step": step, "loss": loss, "norm": norm, **extra_metrics})
    _log(self, step, loss, largest, norm, extra_metrics)


@functools.wraps(_validation)
def log_validation(self: Any, loss: float, step: int, extra_metrics: Any = None) -> None:
    if dist.get_rank() == 0:
        write({"step": step, "validation": loss})
    _validation(self, loss, step, extra_metrics)


@functools.wraps(_finish)
def finish(self: Any, *arguments: Any, **named: Any) -> None:
    """The last act of a checkpoint, which writes its metadata."""
    writer, _, name = os.environ.get("TITAN_KILL_WRITER", "").partition(":")
    if name == Path(self.path).name and str(trainer.world.rank) == writer:
        os.kill(os.getpid(), signal.SIGKILL)
    _finish(self, *arguments, **named)


def wait_for_return(trainer: Any) -> None:
    """After step 5 the members wait for the lost replica to ask, however long it takes to start. In instalments it
    gets a tenth of the state with each step, however fast this machine is."""
    exchange, world = trainer.dataloader.exchange, trainer.world

    def waiting(_: Any, step: int) -> None:
        while step > 5 and len(world.replicas) < world.grid.replicas:
            if world.asking or world.arrivals:
                break
            time.sleep(0.01)
        exchange(world, step)

    trainer.dataloader.exchange = waiting
    InstalmentSize.limit = lambda _, total: total // 10  # type: ignore[method-assign]


def digest(parts: list[torch.nn.Module]) -> str:
    found = hashlib.sha256()
    for part in parts:
        for _, parameter in sorted(part.named_parameters()):
            whole = parameter.detach()
            whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
            found.update(whole.numpy().tobytes())
    return found.hexdigest()


MetricsProcessor.log, MetricsProcessor.log_validation = log, log_validation  # type: ignore[method-assign]
FileSystemWriter.finish = finish  # type: ignore[method-assign]
init_logger()
config = ConfigManager().parse_args()
trainer = config.build()
if config.checkpoint.create_seed_checkpoint:
    trainer.checkpointer.save(0, last_step=True)
else:
    if os.environ.get("TITAN_WAIT"):
        wait_for_return(trainer)
    trainer.train()
    found = digest(trainer.model_parts)
    if dist.get_rank() == 0:
        biases = [b.tolist() for m in trainer.model_parts for n, b in m.named_buffers() if "expert_bias" in n]
        facts = {"step": trainer.step, "tokens": trainer.ntokens_seen, "digest": found, "biases": biases}
        (OUT / f"end-{os.getpid()}.json").write_text(json.dumps(facts))
trainer.close()
