"""Whose state differs: told from what the census says of everyone's, so all survivors find the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from recover.job.grid import Grid
from recover.step.errors import StateDivergedError
from recover.step.record import Record


def drifted(
    grid: Grid, step: int, records: Mapping[int, Record], newcomers: Collection[int] = ()
) -> frozenset[int]:
    """The replicas whose parameters differ from the majority's, in any shard. Raises StateDivergedError without one.

    `newcomers`: replicas that were given their state just now. As long as others are left, these do not count.
    """
    found: set[int] = set()
    for shard in range(grid.replica_size):
        held = {grid.replica(rank): r.fingerprint for rank, r in records.items() if grid.shard(rank) == shard}
        if not held:
            continue
        counted = {replica: value for replica, value in held.items() if replica not in newcomers} or held
        (majority, count), *_ = Counter(counted.values()).most_common()
        if count < len(counted) and 2 * count <= len(counted):
            raise StateDivergedError(
                f"before step {step} replicas {sorted(counted)} hold different parameters, or train different "
                f"ones (shard {shard}: "
                f"{', '.join(f'{replica}: {value:016x}' for replica, value in sorted(counted.items()))}) and there "
                "is no majority to tell which are right; go on from the last checkpoint"
            )
        found |= {replica for replica, value in held.items() if value != majority}
    return frozenset(found)
