"""The initial state: all replicas begin with the bits of the first replica."""

from __future__ import annotations

import torch

from recover.gradients.parts import as_real, local_part
from recover.step.model_checks import refuse_different_models
from recover.world.calls import Call
from recover.world.world import World


def copy_state_from_first_replica(world: World, model: torch.nn.Module) -> None:
    """Copy parameters and buffers of the first replica to all others. A collective call: no tensor is
    sent before all replicas have entered it."""
    with world.call(Call.BUILD):
        _copy(world, model)


def _copy(world: World, model: torch.nn.Module) -> None:
    tensors = [as_real(local_part(t.data)) for t in (*model.parameters(), *model.buffers())]
    while True:
        # Received into copies: if the first replica dies halfway, no replica may keep a mixture of two
        # states.
        received = [tensor.clone() for tensor in tensors]
        refuse_different_models(world, model)
        works = [world.cross.broadcast(tensor) for tensor in received]
        # Wait for each, also after a failure: the communication thread must be idle before the agreement.
        complete = [work.wait() for work in works]
        if world.agree(all(complete)) == 1:
            break
        world.repair()
    for tensor, value in zip(tensors, received, strict=True):
        tensor.copy_(value)
