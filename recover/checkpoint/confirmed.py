"""Saves a checkpoint and compares the state of all replicas, where no step follows whose vote
would do so."""

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
    fingerprint: str | None = None,
) -> None:
    """Save a checkpoint and compare the state of all replicas; again, if a writer is lost meanwhile.

    save:         writes the draft; called by all ranks of a writing replica. None: compare only
    lost:         called with the ranks that were lost meanwhile, and the seconds of their repairs
    fingerprint:  as in `Saver.lacks`
    """
    writing: set[int] = set()
    while writing != writing_replicas(world):  # again if a writer was lost meanwhile
        writing = writing_replicas(world)
        lacking = save is not None and world.replica in writing and saver.lacks(step.index, fingerprint)
        if save and world.replica in writing and together(step, world, lacking):
            save()
        differing, seconds = step.confirm()
        if differing:
            lost(differing, seconds)
        saver.found_equal(step.index + 1, world.replicas)


def together(step: Step, world: World, decided: bool) -> bool:
    """The decision of the first rank of this replica, on all of its ranks."""
    vote = torch.tensor([float(decided and world.shard == 0)], dtype=torch.float64)
    return bool(replica_of(step.state().model).combine(vote))
