"""A state counts as saved when all have been compared after it was taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from recover.checkpoint.saver import Saver
from recover.gradients.replica_interface import replica_of
from recover.world.world import World
from recover.world.writers import writing_replicas

if TYPE_CHECKING:
    from recover.step.step import Step


def save_confirmed(
    world: World,
    step: Step,
    saver: Saver,
    save: Callable[[], object] | None,
    lost: Callable[[tuple[int, ...], float], object],
) -> None:
    """Where no step follows whose vote would confirm the draft. `save`: by all ranks of a replica that writes; None: no
    draft is wanted, only the comparison. `lost` is told of who was lost over it."""
    writing: set[int] = set()
    while writing != writing_replicas(world):  # again, if it was a writer that was lost over it
        writing = writing_replicas(world)
        if save and world.replica in writing and together(step, world, saver.lacks(step.index)):
            save()
        differing, seconds = step.confirm()
        if differing:
            lost(differing, seconds)
        saver.found_equal(step.index + 1, world.replicas)


def together(step: Step, world: World, decided: bool) -> bool:
    """What the first rank of this replica has decided, on all of its ranks."""
    vote = torch.tensor([float(decided and world.shard == 0)], dtype=torch.float64)
    return bool(replica_of(step.state().model).combine(vote))
