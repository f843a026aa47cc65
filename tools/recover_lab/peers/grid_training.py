"""A step of the 3D baseline: tensor and pipeline parallel replicas, one stock gloo all-reduce across them.

Replicas are built as ours are, by torch's own tensor and pipeline parallelism. Torch has no wrapper that reduces the
gradients of such a model across replicas, so they are reduced here, as one flat tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from recover.gradients.parts import as_gradient, own_gradient
from recover.gradients.replica_interface import replica_of
from recover.parallel.threed import threed


class GridTraining:
    """One rank of a replica. Torch's default group is the replica; `cross` is that of its peers in other replicas."""

    def __init__(self, whole: torch.nn.Module, tp: int, pp: int, cross: Any) -> None:
        world: Any = SimpleNamespace(grid=SimpleNamespace(replica_size=tp * pp))
        self.model = threed(whole, world, tp=tp, pp=pp)
        self._cross = cross

    def accumulate(self, batches: Sequence[Any]) -> float:
        """Run all microbatches of a step. Returns the sum of their losses over all replicas."""
        loss = self.model(batches).sum().reshape(1)
        self._cross.allreduce([loss]).wait()
        return float(loss)

    def reduce(self, count: int, clip: float, in_flight: Callable[[], None]) -> None:
        """Reduce the gradients to the mean over `count` microbatches, and clip it. `in_flight` is called during the
        reduction."""
        parameters = list(self.model.parameters())
        gradients = [own_gradient(parameter) for parameter in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        reducing = self._cross.allreduce([flat])
        in_flight()
        reducing.wait()
        flat /= count
        means = [
            part.view_as(gradient)
            for part, gradient in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)
        ]
        replica = replica_of(self.model)
        squared = torch.zeros(1, dtype=torch.float64)
        for parameter, mean in zip(parameters, means, strict=True):
            squared += mean.double().square().sum() / replica.sharing(parameter).copies
        dist.all_reduce(squared)
        flat *= min(1.0, clip / (float(squared.sqrt()) + 1e-6))
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = as_gradient(parameter, mean)
