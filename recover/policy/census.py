"""Holdings of the survivors after a repair, and the event that gives them to the policy."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from recover.policy.roles import Role
from recover.policy.slots import SlotSet

_HEAD = struct.Struct("<IBB")
_ROLES = tuple(Role)


@dataclass(frozen=True)
class Holding:
    """The slots in the local sum of one surviving replica.

    The sum cannot be split: either all of its slots enter the step or none does. `counts` says
    whether the sum enters; the sum of a spare does not until the policy admits it.
    """

    replica: int
    role: Role
    slots: SlotSet
    counts: bool

    def to_bytes(self) -> bytes:
        return _HEAD.pack(self.replica, _ROLES.index(self.role), self.counts) + self.slots.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Holding:
        try:
            replica, role, counts = _HEAD.unpack_from(data)
            return cls(replica, _ROLES[role], SlotSet.from_bytes(data[_HEAD.size :]), bool(counts))
        except (struct.error, IndexError, ValueError) as error:
            raise ValueError(
                f"a census record of {len(data)} bytes cannot be read ({error}): "
                "all ranks must run the same version of recover"
            ) from None


@dataclass(frozen=True)
class FailureEvent:
    """Input of the policy after a repair: the holdings of the survivors, in any order, and B.

    Dead replicas are not listed: the slots that no survivor holds are missing. Each rank of a
    replica may send the record of its replica; equal records are merged. `resting`: replicas that
    run nothing in this step while any other replica is left.
    """

    census: tuple[Holding, ...]
    global_batch: int
    resting: frozenset[int]

    def __init__(self, census: Iterable[Holding], global_batch: int, resting: Collection[int] = ()) -> None:
        object.__setattr__(self, "census", tuple(sorted(set(census), key=lambda holding: holding.replica)))
        object.__setattr__(self, "global_batch", global_batch)
        object.__setattr__(self, "resting", frozenset(resting))
        self._check()

    def _check(self) -> None:
        """A census that breaks these was not gathered from one step of one job: no plan could be
        right."""
        if not self.census:
            raise ValueError("the census is empty: a step can only go on while at least one replica lives")
        if len({holding.replica for holding in self.census}) < len(self.census):
            clash = next(
                a.replica
                for a, b in zip(self.census, self.census[1:], strict=False)
                if a.replica == b.replica
            )
            raise ValueError(
                f"replica {clash} is in the census twice with different records: its ranks must agree"
            )
        union = SlotSet.union(holding.slots for holding in self.census)
        if len(union) < sum(len(holding.slots) for holding in self.census):
            raise ValueError(
                f"a slot is held twice in the census ({self._shared()}): every slot has one holder"
            )
        counted = sum(len(holding.slots) for holding in self.census if holding.counts)
        if counted > self.global_batch:
            raise ValueError(
                f"{counted} microbatches count already, but the global batch is {self.global_batch}"
            )
        for holding in self.census:
            if not holding.counts and any(start < self.global_batch for start, _ in holding.slots.ranges):
                raise ValueError(
                    f"replica {holding.replica} does not count but holds slots {holding.slots}: "
                    f"spares run slots from {self.global_batch} on"
                )

    def _shared(self) -> str:
        return next(
            f"slots {a.slots & b.slots} by replicas {a.replica} and {b.replica}"
            for i, a in enumerate(self.census)
            for b in self.census[i + 1 :]
            if a.slots & b.slots
        )
