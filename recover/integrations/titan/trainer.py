"""torchtitan's trainer on ReCoVer: each step on exactly B microbatches, whichever replicas die."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

import recover
from recover.gradients.replica_interface import mark
from recover.integrations.loggers import name_wandb_run
from recover.integrations.titan.checkpoints import RECOVER, OneWriter
from recover.integrations.titan.compatibility import check_torchtitan, converted, refuse
from recover.integrations.titan.loaders import Batch, SlotLoaders
from recover.integrations.titan.metrics import WrittenOnce
from recover.integrations.titan.replica import TitanReplica
from recover.job.process import rank_on_host
from recover.parallel.torch_world import init_replica_world


@dataclass(kw_only=True, slots=True)
class RecoverConfig:
    reduction: Literal["fast", "reproducible"] = "fast"
    """Sums of gradients over replicas: `reproducible` has the same bits for any number of replicas."""

    reduction_bits: Literal[64, 32] = 64
    """Bits of the words of reproducible sums; 32: half the traffic, for at most 256 microbatches a step."""

    samples: Literal["exact", "partitioned"] = "exact"
    """Only `exact`: slot s of step t has the same data, whichever replica computes it."""

    policy: Literal["balanced", "paced", "adaptive"] = "balanced"
    """How slots are dealt to replicas; `paced`: slow ones get fewer; `adaptive` shrinks the batch after a loss."""

    join: Literal["pause", "instalments"] = "pause"
    """How a rejoining replica receives the state: at once between two steps, or a few parameters with each step."""

    verify: int = 0
    """Slots of each step that a second replica computes as well, to compare; needs --debug.deterministic."""

    positions_every: int = 10
    """Steps between two exchanges of the positions of data loaders; after a loss at most as many are read again."""


class RecoverTrainer(Trainer):
    """torchtitan's trainer. Its world is one replica; `recovery` is the `recover.Step` over all replicas."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        recover: RecoverConfig = field(default_factory=RecoverConfig)

    def __init__(self, config: Config) -> None:
        check_torchtitan()
        self.world = world = recover.init()
        refuse(config, world.grid.replica_size)
        name_wandb_run(world)
        # Rank and size within the replica, for torchtitan and for code that reads torchrun's variables.
        os.environ.update(RANK=str(world.shard), WORLD_SIZE=str(world.grid.replica_size))
        os.environ.setdefault("LOCAL_RANK", str(rank_on_host()))
        config.dataloader = SlotLoaders.Config(each=config.dataloader)
        config.metrics = converted(WrittenOnce.Config, config.metrics)
        if config.checkpoint.enable:
            config.checkpoint = converted(OneWriter.Config, config.checkpoint)
        self.progress = {"tokens": 0, "writer": -1}  # the same on all replicas
        self._in_step, self._tokens, self._reading = False, 0, list[float]()  # the latter two: to be logged
        super().__init__(config)
        self.metrics_processor.trainer = self
        if isinstance(self.checkpointer, OneWriter):
            self.checkpointer.trainer = self
            self.checkpointer.states[RECOVER] = _Position(self)
        batch, dims, norm = self.gradient_accumulation_steps, self.parallel_dims, config.training.max_norm
        options = asdict(config.recover)  # all but positions_every are options of recover.Step
        positions_every = options.pop("positions_every")
        self.dataloader.serve(batch, self.num_pipeline_parallel_microbatches, positions_every)
        self._batch_ranks = dims.get_mesh("batch").size() if dims.dp_enabled else 1
        # Each rank has a part of a loss: the mean over ranks of part times this number is the loss.
        stages = dims.pp * self.pp_has_last_stage if dims.pp_enabled else 1
        self._loss_parts = self._batch_ranks * dims.cp * stages
        model = torch.nn.ModuleList(self.model_parts)
        mark(model, TitanReplica(dims, self.device, model))
        # In these buffers forward counts the tokens of each expert.
        buffers = [name for name, _ in model.named_buffers() if name.endswith(".tokens_per_expert_E")]
        self._counts = [model.get_buffer(name) for name in buffers]
        self.recovery = recover.Step(
            world,
            model,
            list(self.optimizers),
            batch,
            clip=norm if 0 < norm < math.inf else None,
            scheduler=self.lr_schedulers,
            seed=config.debug.seed or 0,
            buffers=buffers,
            extra={"titan.progress": self.progress, "titan.data": self.dataloader.shared},
            **options,
        )
        self._take_over_hooks(list(self.optimizers))
        if not dims.pp_enabled:  # a pipeline calls its own loss function and backward for each microbatch
            self.loss_fn: Callable[..., Any] = self._recorded(self.loss_fn)

    def init_distributed(self) -> ParallelDims:
        init_replica_world(self.world, self.device)
        torch.autograd.set_multithreading_enabled(False)  # as torchtitan does for a process group of its own
        return super().init_distributed()

    def _take_over_hooks(self, optimizers: list[Any]) -> None:
        """Run the hooks of the optimizers' container (one balances experts) with the optimizers that `Step` calls."""
        before, after = self.optimizers._optimizer_step_pre_hooks, self.optimizers._optimizer_step_post_hooks

        def call(hooks: dict[int, Any]) -> None:
            for hook in list(hooks.values()) if self._in_step else ():
                hook(self.optimizers, (), {})

        def prepare(*_: Any) -> None:
            self.checkpointer.maybe_wait_for_staging()
            ranks = self.world.grid.replica_size
            # Step has the mean over microbatches and ranks; torchtitan expects the sum over microbatches.
            for count in self._counts if self._in_step else ():
                count.copy_((count.double() * self.gradient_accumulation_steps * ranks).round() / ranks)
            call(before)

        optimizers[0].register_step_pre_hook(prepare)
        optimizers[-1].register_step_post_hook(lambda *_: call(after))

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        recovery, has_stages = self.recovery, self.parallel_dims.pp_enabled
        one = torch.ones((), dtype=torch.int64, device=self.device)
        rates, began = self.lr_schedulers.get_metrics(), time.perf_counter()
        self._in_step = True
        for batches in recovery.microbatches(self.dataloader):
            self._reading.append(time.perf_counter() - began)
            rates = self.lr_schedulers.get_metrics()  # a joining replica has received them by now
            tokens = self._valid_tokens(batches)
            batches = tree_map_only(torch.Tensor, lambda each: each.to(self.device), batches)
            inputs, labels = [each for each, _ in batches], [each for _, each in batches]
            with recovery.own_backward(weight=tokens) as record:
                self._record = lambda total, **how: record(self._mean_of(total, tokens), **how)  # noqa: B023
                # Divided by one token, the loss is a sum over tokens: `tokens` times the mean.
                total = self.forward_backward_step(
                    input_dict=inputs if has_stages else inputs[0],
                    labels=labels if has_stages else labels[0],
                    global_valid_tokens=one,
                )
                if has_stages:
                    self._record(total)
            began = time.perf_counter()
        self._in_step, self.step = False, recovery.index
        self._count(rates)

    def _recorded(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """The loss function, wrapped so that gradients are reduced during the backward pass that follows it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            loss, metrics = loss_fn(*args, **kwargs)
            self._record(loss, before_last_pass=True)
            return loss, metrics

        return call

    def _mean_of(self, total: Any, tokens: int) -> torch.Tensor:
        loss = total.detach().full_tensor() if hasattr(total, "full_tensor") else total.detach()
        return loss.reshape(()) * self._loss_parts / max(tokens, 1)

    def _valid_tokens(self, batches: list[Batch]) -> int:
        """Tokens with a label, over the ranks of the replica that share the microbatch."""
        tokens = torch.tensor(sum(int((labels != IGNORE_INDEX).sum()) for _, labels in batches))
        if self.parallel_dims.dp_enabled:
            tokens = tokens.to(self.device)
            dist.all_reduce(tokens, group=self.parallel_dims.get_mesh("batch").get_group())
        return int(tokens)

    def _count(self, rates: dict[str, float]) -> None:
        """Update tokens, positions of the data and metrics after a commit, on all replicas."""
        training, recovery, metrics = self.config.training, self.recovery, self.metrics_processor
        tokens = training.local_batch_size * training.seq_len  # of a microbatch, on this rank
        self.progress["tokens"] += tokens * self.gradient_accumulation_steps // self.parallel_dims.cp
        self.ntokens_seen = self.progress["tokens"]
        self._tokens += tokens * len(recovery.samples)
        if self.step % self.dataloader.every == 0:
            self.dataloader.exchange(self.world, self.step)
        if metrics.should_log(self.step):
            seen = self.ntokens_seen * self._batch_ranks * self.parallel_dims.cp
            extra, waited = {"n_tokens_seen": seen, **rates}, self._reading
            metrics.write(self.step, self._tokens, waited, recovery.loss, recovery.grad_norm, extra)
            self._tokens, self._reading = 0, []

    def train(self) -> None:
        # Waiting for a repair is no failure: ReCoVer ends ranks that are blocked.
        dist_utils.set_pg_timeouts = lambda timeout, parallel_dims: None
        super().train()
        self.recovery.confirm()

    def should_continue_training(self) -> bool:
        return self.recovery.index < self.config.training.steps and not self.recovery.stop_agreed

    def state_dict(self) -> dict[str, Any]:
        """The state that torchtitan would have with a data-parallel rank for each loader: its share of the tokens."""
        return {**super().state_dict(), "ntokens_seen": self.ntokens_seen // self.gradient_accumulation_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.ntokens_seen *= self.gradient_accumulation_steps
        self.progress["tokens"], self.dataloader.shared["position"] = self.ntokens_seen, self.step
        self.resume({"index": self.step})
        self.recovery.compare_optimizers()

    def resume(self, saved: dict[str, Any]) -> None:
        """Continue after step `saved["index"]`, with the other fields of a saved position."""
        here, batch = self.recovery.state_dict(), self.gradient_accumulation_steps
        samples = {**here["samples"], "next": saved["index"] * batch}
        self.recovery.load_state_dict({**here, **saved, "global_batch": batch, "samples": samples})


class _Position:
    """State in a checkpoint that torchtitan alone does not have: skipped steps and exponents of sums."""

    def __init__(self, trainer: RecoverTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, str]:
        return {"position": json.dumps(self._trainer.recovery.state_dict())}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self._trainer.resume(json.loads(state["position"]))
