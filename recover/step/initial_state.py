"""All replicas start from the same bits, whatever each of them has made."""

from __future__ import annotations

import torch

from recover.gradients.parts import as_real, local_part
from recover.step.model_checks import refuse_different_models
from recover.world.calls import Call
from recover.world.world import World


def copy_state_from_first_replica(world: World, model: torch.nn.Module) -> None:
    """A collective call: no tensor is sent before all replicas have come to it."""
    with world.call(Call.BUILD):
        _copy(world, model)


def _copy(world: World, model: torch.nn.Module) -> None:
    tensors = [as_real(local_part(t.data)) for t in (*model.parameters(), *model.buffers())]
    while True:
        # Into copies: if the first replica dies halfway, nobody holds a mixture of two.
        received = [tensor.clone() for tensor in tensors]
        refuse_different_models(world, model)
        works = [world.cross.broadcast(tensor) for tensor in received]
        complete = [work.wait() for work in works]  # each one: the communication thread must come to rest
        if world.agree(all(complete)) == 1:
            break
        world.repair()
    for tensor, value in zip(tensors, received, strict=True):
        tensor.copy_(value)
