"""Saves diverged states: without a majority, one replica of each state saves it, and the run ends.

A person decides: no run resumes from one of these states until it is renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from recover.checkpoint.directory import UNCONFIRMED
from recover.checkpoint.saver import Saver
from recover.checkpoint.tensors import Tensors
from recover.step.errors import StateDivergedError
from recover.world import rank_exit
from recover.world.liveness.board import ENDED
from recover.world.world import World


def save_states(
    world: World,
    step: int,
    error: StateDivergedError,
    saver: Saver,
    tensors: Tensors,
    facts: Callable[[], tuple[dict[str, Any], Mapping[str, torch.Tensor]]],
) -> None:
    """Save one copy of each state, and add the paths of the copies and the remedy to the error.

    Called by all ranks. `facts`: facts and further tensors of the state after `step`.
    """
    names = {replicas[0]: f"{UNCONFIRMED}-{step}-replica-{replicas[0]}" for replicas in error.states}
    world.board.in_step(world.rank, ENDED)  # saving may take long: the watchdog must not wait for this rank
    if world.replica in names and _is_on_one_host(world):
        values, beside = facts()
        path = saver.save_unconfirmed(step, tensors, values, names[world.replica], beside)
        outcome = f"saved as {path}" if path else "could not be saved (is the disk full?)"
        text = f"the state of replica {world.replica} after step {step} is {outcome}"
        rank_exit.report(text, world.shard == 0)
    where = ", ".join(f"{names[replicas[0]]} ({_named(replicas)})" for replicas in error.states)
    error.say(
        f"the states are saved as {where} in checkpoints/ of the run; find out which one is right, rename it to "
        f"{UNCONFIRMED}-{step}, and resume: otherwise the run goes on from its last good checkpoint"
    )


def _is_on_one_host(world: World) -> bool:
    """Whether all ranks of this replica are on one host: otherwise they may not see the same
    directory."""
    ranks = world.grid.replica_peers(world.rank) | {world.rank}
    return len(ranks) == 1 or all(world.board.pid(rank) for rank in ranks)


def _named(replicas: tuple[int, ...]) -> str:
    return f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas))}"
