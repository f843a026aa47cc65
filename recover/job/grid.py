"""The grid of ranks: replicas and shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """`replicas` copies of the model, each on `replica_size` consecutive ranks. Never changes in a
    run."""

    replicas: int
    replica_size: int = 1

    @classmethod
    def of(cls, ranks: int, replica_size: int = 1) -> Grid:
        if replica_size < 1 or ranks < 1 or ranks % replica_size:
            raise ValueError(
                f"{ranks} ranks cannot be cut into replicas of {replica_size}; "
                f"choose a number of ranks that is a multiple of the replica size"
            )
        return cls(ranks // replica_size, replica_size)

    @property
    def ranks(self) -> int:
        return self.replicas * self.replica_size

    def replica(self, rank: int) -> int:
        return rank // self.replica_size

    def shard(self, rank: int) -> int:
        return rank % self.replica_size

    def replica_peers(self, rank: int) -> frozenset[int]:
        """The other ranks of this rank's replica: without any one of them the replica is lost."""
        first = self.replica(rank) * self.replica_size
        return frozenset(range(first, first + self.replica_size)) - {rank}

    def whole(self, alive: Iterable[int]) -> tuple[int, ...]:
        """The ranks of complete replicas. The other ranks are orphans."""
        alive = frozenset(alive)
        return tuple(sorted(rank for rank in alive if self.replica_peers(rank) <= alive))

    def replicas_of(self, members: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({self.replica(rank) for rank in members}))

    def peers(self, rank: int, members: Iterable[int]) -> tuple[int, ...]:
        """The members that hold the same shard as `rank`, in replica order: its cross-replica
        group."""
        return tuple(sorted(other for other in members if self.shard(other) == self.shard(rank)))
