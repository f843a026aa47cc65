"""One rank's part of a pipelined model, and the schedules that run rounds of microbatches.

Parameters keep the names of the whole model, so a checkpoint fits any other grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from recover.gradients.parts import on_device
from recover.parallel.threed.gather import gather_parameters
from recover.parallel.threed.mesh import MeshReplica, ReplicaMesh
from recover.parallel.threed.stage import Stage

Batch = Mapping[str, torch.Tensor] | Sequence[torch.Tensor]
IGNORED = -100  # torch's index of targets that do not count


class Pipeline(torch.nn.Module):
    """This rank's part of the model. Called with a round, it runs forward and backward, and returns
    the losses of the microbatches."""

    cos: torch.Tensor
    sin: torch.Tensor
    replica: MeshReplica

    def __init__(
        self, model: Any, mesh: ReplicaMesh, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.config, self.mesh = model.config, mesh
        cut = mesh.cut
        mine = range(mesh.stage, cut.stages, cut.pp)
        is_last = mine[-1] == cut.stages - 1
        if mesh.stage == 0 or (is_last and self.config.tied):
            self.embedding = model.embedding
        layers = [i for stage in mine for i in cut.layers_of(stage, self.config.layers)]
        self.blocks = torch.nn.ModuleDict({str(i): model.blocks[i] for i in layers})
        if is_last:
            self.norm, self.output = model.norm, model.output
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)
        self._device, self._dtype = device, dtype
        self._mine = mine
        self._stages: tuple[Stage, ...] = ()
        self._schedule: Any = None
        self._made_for: tuple[int, ...] = ()
        self._counts: list[int] = []  # number of targets of each microbatch, over all of its rows
        self._weights: list[float] = []
        self._losses: list[torch.Tensor] = []

    def make_stages(self) -> None:
        """Create the stages. Called last, when all modules are final. Stages are views: parameters keep
        their names."""
        cut, layers = self.mesh.cut, self.config.layers
        self._stages = tuple(Stage(self, index, cut.layers_of(index, layers)) for index in self._mine)

    def forward(self, round: Sequence[Batch], weights: Sequence[float] | None = None) -> torch.Tensor:
        """Forward and backward of every microbatch of a round; returns their losses, on every rank
        of the replica.

        A loss is the mean over the targets of a microbatch that are not -100. `weights`: how often
        each loss counts in the mean over the step, the same list on all ranks; by default 1.0.
        """
        weights = [1.0] * len(round) if weights is None else [float(weight) for weight in weights]
        if len(weights) != len(round):
            raise ValueError(
                f"{len(weights)} weights were given for {len(round)} microbatches; give one for each"
            )
        self._begin(weights, self.replica.seed)
        parts = [self._rows(batch) for batch in round]
        shapes = {tuple(tokens.shape) for tokens, _ in parts}
        if len(shapes) != 1:
            raise ValueError(
                f"the microbatches of a round must have one shape, but there are {sorted(shapes)}"
            )
        tokens, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        schedule = self._schedule_for(len(round), *shapes.pop())
        inputs = (tokens,) if self._stages[0].is_first else ()
        target = targets if self._stages[-1].is_last else None
        with self._computing():
            schedule.step(*inputs, target=target, return_outputs=False)
        self.replica.ran(weights)
        return self._share_losses(len(round))

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """The loss of one microbatch without gradients, the same on every rank of the replica."""
        self._begin([1.0], None)
        tokens, targets = self._rows(batch)
        was_training = self.training
        self.eval()
        for stage in self._stages:
            x = tokens
            if not stage.is_first:
                x = self._activation(len(tokens), tokens.shape[1], self._device)
                dist.recv(x, src=self.mesh.rank_of_stage(stage.index - 1), group=self.mesh.pipeline_group)
            with self._computing():
                x = stage(x)
                if stage.is_last:
                    self._loss(x, targets)
            if not stage.is_last:
                dist.send(x, dst=self.mesh.rank_of_stage(stage.index + 1), group=self.mesh.pipeline_group)
        self.train(was_training)
        return float(self._share_losses(1))

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter of the whole model, in the order of their names, on the first rank of the
        replica.

        All its ranks must run through this; the others get nothing.
        """
        return gather_parameters(self, self._device)

    def _begin(self, weights: list[float], seed: Callable[[int, int], None] | None) -> None:
        self._counts, self._weights, self._losses = [], weights, []
        for stage in self._stages:
            stage.microbatch, stage.on_microbatch = -1, seed

    def _rows(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's rows of a microbatch: expert-parallel ranks share them."""
        tokens, targets = (batch["tokens"], batch["targets"]) if isinstance(batch, Mapping) else batch
        self.mesh.cut.check_rows(len(tokens))
        if tokens.shape[1] % self.mesh.cut.tp or tokens.shape[1] > self.config.seq_len:
            raise ValueError(
                f"a sequence of {tokens.shape[1]} tokens must be a multiple of tp={self.mesh.cut.tp}, "
                f"and no longer than the model's seq_len {self.config.seq_len}"
            )
        self._counts.append(int((targets != IGNORED).sum()))
        parts = (t.chunk(self.mesh.cut.ep)[self.mesh.expert] for t in (tokens, targets))
        mine = (on_device(part, self._device) for part in parts)
        return next(mine), next(mine)

    def _computing(self) -> ExitStack:
        """The contexts of forward and backward."""
        stack = ExitStack()
        if self.mesh.cut.tp > 1:
            stack.enter_context(loss_parallel())
        if self._dtype is not None:
            stack.enter_context(torch.autocast(self._device.type, self._dtype))
        return stack

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The scalar from which backward starts: this rank's part of the mean over the microbatch,
        times its weight.

        Expert-parallel ranks may have different numbers of targets: each divides by the number
        of all of them.
        """
        number = self._stages[-1].microbatch
        total = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss = total / max(1, self._counts[number])
        loss = loss.to_local() if isinstance(loss, DTensor) else loss
        self._losses.append(loss.detach())
        return loss if self._weights[number] == 1.0 else loss * self._weights[number]

    def _share_losses(self, count: int) -> torch.Tensor:
        """The last stage sends the losses to all others; expert-parallel ranks have a part each."""
        losses = torch.zeros(count, dtype=torch.float64, device=self._device)
        if self._losses:
            losses.copy_(torch.stack(self._losses))
        last = self.mesh.rank_of_stage(self.mesh.cut.stages - 1)
        dist.broadcast(losses, src=last, group=self.mesh.pipeline_group)
        if self.mesh.over_ep is not None:
            self.mesh.over_ep.add_up(losses)
        return losses

    def _schedule_for(self, count: int, rows: int, length: int) -> Any:
        """The schedule for rounds of this form; a round of another form gets new torch stages.

        A torch stage is set up for one number of microbatches, that of its last schedule: two
        schedules in turns on one stage would run with stale state. It holds buffers for all of
        its microbatches, so only one schedule is kept.
        """
        if self._made_for == (count, rows, length):
            return self._schedule
        cut = self.mesh.cut
        between = self._activation(rows, length, "meta").requires_grad_()
        # Logits are not sent, but torch before 2.13 compares them with the result of the last stage.
        logits = torch.empty(
            rows,
            length,
            self.config.vocab,
            dtype=self._dtype or between.dtype,
            device="meta",
            requires_grad=True,
        )
        stages = [
            PipelineStage(
                stage,
                stage.index,
                cut.stages,
                self._device,
                input_args=torch.empty(rows, length, dtype=torch.int64, device="meta")
                if stage.is_first
                else between,
                output_args=logits if stage.is_last else between,
                group=self.mesh.pipeline_group,
            )
            for stage in self._stages
        ]
        if cut.stages_per_rank > 1:
            # Interleaving needs a count that divides into rounds; ScheduleLoopedBFS runs all
            # forwards and then all backwards.
            fits = count % max(1, count // cut.pp) == 0
            kind = ScheduleInterleaved1F1B if fits else ScheduleLoopedBFS
            self._schedule = kind(stages, count, loss_fn=self._loss, scale_grads=False)  # type: ignore[arg-type]
        else:
            fits = cut.schedule != "gpipe" and count >= cut.stages
            single = Schedule1F1B if fits else ScheduleGPipe
            self._schedule = single(stages[0], count, loss_fn=self._loss, scale_grads=False)
        self._made_for = (count, rows, length)
        return self._schedule

    def _activation(self, rows: int, length: int, device: torch.device | str) -> torch.Tensor:
        """An empty activation between two stages: this rank's part of the sequence."""
        dtype = next(self.parameters()).dtype
        return torch.empty(rows, length // self.mesh.cut.tp, self.config.dim, dtype=dtype, device=device)
