"""Who writes to disk for all: one for each run directory that there is."""

from __future__ import annotations

from recover.world.world import World


def writers(world: World) -> tuple[int, ...]:
    """Those ranks; on one host, or where all hosts share the directory, the first living one."""
    return tuple(group[0] for group in world.job.see_the_same(world.members))


def writing_replicas(world: World) -> set[int]:
    """Those of which one rank writes; its mates help it to."""
    return {world.grid.replica(rank) for rank in writers(world)}
