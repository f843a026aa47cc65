"""Where the gradients of parameters lie in flat buckets, and how parameters are cut into runs for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recover.gradients.deferred import Later
from recover.gradients.parts import as_gradient, as_real, local_part


@dataclass(eq=False, slots=True)
class Place:
    """The room for a parameter's gradient: in a bucket, or in the tray of one."""

    parameter: torch.nn.Parameter
    index: int  # of the bucket
    room: torch.Tensor
    seen: tuple[torch.Tensor, torch.Tensor] | None = None  # the last mean, and the gradient in it

    def gradient_in(self, mean: torch.Tensor) -> torch.Tensor:
        """The parameter's gradient, out of a whole bucket's mean. Mostly that is the same tensor in every step: while
        the optimizer is about to run, a device has nothing to do, and every call for a parameter counts."""
        if self.seen is not None and self.seen[0] is mean:
            return self.seen[1]
        room = self.room
        part = mean.as_strided(room.shape, room.stride(), room.storage_offset())
        gradient = as_gradient(self.parameter, part)
        if gradient is part and mean.dtype is room.dtype:  # otherwise it was made for this step alone
            self.seen = mean, gradient
        return gradient


def marked(places: list[Place], marks: torch.Tensor) -> Later[set[Place]]:
    """Those whose marks are not zero, of a round and so of all before it: everyone marks all that it has used."""
    return Later(lambda marked: {p for p, mark in zip(places, marked, strict=True) if mark}, marks)


def room_for(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A tensor of the shape that this rank's part of the gradient takes in a bucket."""
    return as_real(local_part(parameter.detach()))


def cut(parameters: list[torch.nn.Parameter], limit: int) -> list[list[torch.nn.Parameter]]:
    """Into runs of at most `limit` numbers, or of one parameter that has more."""
    runs: list[list[torch.nn.Parameter]] = []
    filled = limit
    for parameter in parameters:
        size = room_for(parameter).numel()
        if not runs or (filled and filled + size > limit):
            runs.append([])
            filled = 0
        runs[-1].append(parameter)
        filled += size
    return runs
