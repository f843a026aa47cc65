"""step.on_first: the successor of a lost replica makes its calls, once."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from recover.step.on_first import OnFirst


class Ranks:
    """Ranks with a view of the calls of their own, and with the same members."""

    def __init__(self, *members: int) -> None:
        self.members, self.did = members, list[tuple[int, int]]()
        self.held: dict[int, OnFirst] = {}
        for rank in members:
            self.come(rank)

    def come(self, rank: int) -> None:
        ranks = self

        class World(SimpleNamespace):
            @property
            def members(self) -> tuple[int, ...]:
                return ranks.members

        board = SimpleNamespace(step=lambda rank: 0)
        world: Any = World(rank=rank, outside=False, board=board, closing=[])
        randomness: Any = SimpleNamespace(apart=nullcontext)
        self.held[rank] = OnFirst(world, randomness)

    def ask(self, step: int, *, dies: int | None = None) -> None:
        for rank in self.members:
            if rank != dies:
                self.held[rank].call(step, lambda rank=rank: self.did.append((step, rank)), "it", False)


@pytest.mark.guarantee(
    "Joining",
    "A `step.on_first` call of a dead replica runs on a replica that knows of it, also if only a joined "
    "replica is left.",
)
@pytest.mark.parametrize("newcomer", [1, 9])
def test_on_first_call_of_a_dead_replica_runs_on_its_successor(newcomer: int) -> None:
    """Numbers are given when a replica is started: a replica that joins last may have the lowest."""
    ranks = Ranks(0, 4, 5)
    ranks.ask(1)
    ranks.ask(2, dies=0)
    ranks.members = tuple(sorted((newcomer, 4, 5)))
    ranks.come(newcomer)
    for rank in ranks.members:
        ranks.held[rank].take_over()
    assert ranks.did == [(1, 0), (1, 4), (2, 4)]  # no rank knows whether 0 had finished the first
    ranks.ask(3)
    assert ranks.did[3:] == [(3, min(ranks.members))]
