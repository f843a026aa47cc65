"""Engines: how the ranks of one replica compute the microbatches of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

import recover
from recover.gradients.parts import on_device
from recover.gradients.replica_interface import replica_of
from recover.parallel import blocks_of, compile_blocks, plain_name, recompute_blocks, rows
from recover.train.config import Config
from recover.train.models import Llama, LlamaConfig
from recover.train.pace import Pace
from recover.world.world import World

Batch = dict[str, torch.Tensor]


class Engine(Protocol):
    """One rank of a replica, as the training loop uses it."""

    model: torch.nn.Module  # this rank's part, with the parameter names of the whole model

    def work(self, step: recover.Step, stream: Any) -> Iterator[None]:
        """Run this replica's share of one step; yields after each microbatch or round."""

    def loss(self, batch: Batch) -> float:
        """Mean loss of one microbatch, without gradients; the same on every rank of the replica."""

    def rehearse(self, batch: Batch) -> None:
        """Forward and backward of one microbatch outside of any step, to warm up and to trigger torch's warnings."""

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter of the whole model, sorted by name. All ranks of the replica must call it."""


def make_engine(config: Config, shape: LlamaConfig, world: World, device: torch.device) -> Engine:
    torch.manual_seed(config.seed)
    if config.parallel == "3d":
        return PipelineEngine(config, shape, world, device)
    return MicrobatchEngine(config, shape, world, device)


class MicrobatchEngine:
    """Computes microbatches one by one: all rows of them, or this rank's rows if the replica is sharded (hsdp)."""

    def __init__(self, config: Config, shape: LlamaConfig, world: World, device: torch.device) -> None:
        self._world, self._device = world, device
        self._pace = Pace(config.pace)
        self._autocast = torch.bfloat16 if config.dtype == "bfloat16" else None
        self.model: torch.nn.Module = Llama(shape).to(device)
        if config.parallel == "hsdp":
            self.model = recover.hsdp(
                self.model, world, param_dtype=self._autocast, checkpoint_activations=config.recompute
            )
            self._autocast = None  # FSDP2 casts
        elif config.recompute:
            recompute_blocks(self.model)
        if config.compile:
            compile_blocks(blocks_of(self.model))

    def work(self, step: recover.Step, stream: Any) -> Iterator[None]:
        for batch in step.microbatches(stream):
            self._pace.wait()
            step.backward(self._forward(batch))
            self._pace.note()
            yield

    @torch.no_grad()
    def loss(self, batch: Batch) -> float:
        self.model.eval()
        loss = self._forward(batch).double().reshape(1).cpu()
        self.model.train()
        replica = replica_of(self.model)
        return float(replica.combine(loss)) / replica.size

    def rehearse(self, batch: Batch) -> None:
        self._forward(batch).backward()
        for parameter in self.model.parameters():
            parameter.grad = None

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        named = {plain_name(name): p.detach() for name, p in self.model.named_parameters()}
        for name, parameter in sorted(named.items()):
            whole = getattr(parameter, "full_tensor", None)
            yield name, whole() if whole else parameter

    def _forward(self, batch: Batch) -> torch.Tensor:
        mine = rows(self._world, batch)
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            tokens, targets = (on_device(mine[name], self._device) for name in ("tokens", "targets"))
            loss: torch.Tensor = self.model(tokens, targets)
        return loss


class PipelineEngine:
    """A rank of a 3D grid, which holds a part of each layer or some of the layers: a round of microbatches goes
    through the pipeline at once."""

    def __init__(self, config: Config, shape: LlamaConfig, world: World, device: torch.device) -> None:
        self._pace = Pace(config.pace)
        self._pipeline = recover.threed(
            Llama(shape).to(device),
            world,
            tp=config.tp,
            pp=config.pp,
            ep=config.ep,
            schedule=config.schedule,
            param_dtype=torch.bfloat16 if config.dtype == "bfloat16" else None,
            checkpoint_activations=config.recompute,
        )
        self.model: torch.nn.Module = self._pipeline
        if config.compile:
            compile_blocks(self._pipeline.blocks.values())

    def work(self, step: recover.Step, stream: Any) -> Iterator[None]:
        for batches in step.rounds(stream):
            self._pace.wait(len(batches))
            step.backward(self._pipeline(batches))
            self._pace.note(len(batches))
            yield

    def loss(self, batch: Batch) -> float:
        return self._pipeline.evaluate(batch)

    def rehearse(self, batch: Batch) -> None:
        self._pipeline([batch])
        for parameter in self.model.parameters():
            parameter.grad = None

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._pipeline.full_parameters()
