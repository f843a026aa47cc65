"""The ranks that write to disk for all: one for each run directory."""

from __future__ import annotations

from recover.world.world import World


def writers(world: World) -> tuple[int, ...]:
    """The living ranks that write, one for each run directory: on one host, or where all hosts
    share the directory, the first."""
    return tuple(group[0] for group in world.job.ranks_by_run_directory(world.members))


def writing_replicas(world: World) -> set[int]:
    """The replicas that have a writing rank; the other ranks of the replica help it."""
    return {world.grid.replica(rank) for rank in writers(world)}
