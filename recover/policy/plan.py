"""Plans: the share of every replica, at the start of a step (`Layout`) and after a loss
(`PolicyDecision`).

Both are lists of `Share`, so the start of a step and every repair in it are carried out alike:
keep or clear the local sum, run some slots, reduce with or without the own sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from recover.policy.census import Holding
from recover.policy.roles import RestoreMode, Role
from recover.policy.slots import SlotSet


@dataclass(frozen=True)
class Share:
    """The part of one replica in an attempt: the slots that it keeps in its local sum and those
    that it runs. A share replaces any earlier share of the same step."""

    replica: int
    role: Role
    counts: bool  # its sum enters the reduction; the sum of a spare does not
    kept: SlotSet  # what stays in its local sum; when empty, the sum is cleared before anything is run
    run: SlotSet  # what it runs now, on top

    def holding(self, finished: SlotSet | None = None) -> Holding:
        """The census record of this replica after it has run `finished` (default: all of `run`)."""
        done = self.run if finished is None else finished
        if done - self.run:
            raise ValueError(
                f"replica {self.replica} cannot have run slots {done - self.run}: it was dealt {self.run}"
            )
        return Holding(self.replica, self.role, self.kept | done, self.counts)


@dataclass(frozen=True)
class _Shares:
    shares: tuple[Share, ...]  # in the order of the replicas' numbers
    _by_replica: dict[int, Share] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shares", tuple(sorted(self.shares, key=lambda share: share.replica)))
        object.__setattr__(self, "_by_replica", {share.replica: share for share in self.shares})

    def share(self, replica: int) -> Share:
        try:
            return self._by_replica[replica]
        except KeyError:
            known = ", ".join(map(str, self._by_replica))
            raise LookupError(
                f"replica {replica} has no share in this plan, which is for replicas {known}"
            ) from None

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(self._by_replica)

    @property
    def committed(self) -> int:
        """The microbatches in the step's sum once every share is carried out."""
        return sum(len(share.kept) + len(share.run) for share in self.shares if share.counts)

    def holdings(self) -> tuple[Holding, ...]:
        """The census once every share is carried out."""
        return tuple(share.holding() for share in self.shares)


@dataclass(frozen=True)
class Layout(_Shares):
    """The plan of a step at its start, and of every step after it until the next loss."""

    @classmethod
    def of(cls, dealt: Iterable[tuple[int, Role, SlotSet]]) -> Layout:
        return cls(
            tuple(Share(replica, role, not role.is_spare, SlotSet(), slots) for replica, role, slots in dealt)
        )

    def with_resting(self, replicas: Iterable[int]) -> Layout:
        """The same plan, with these replicas in addition, which run nothing."""
        idle = (Share(replica, Role.MINOR, True, SlotSet(), SlotSet()) for replica in replicas)
        return Layout((*self.shares, *idle))

    @property
    def accum(self) -> int:
        """The accumulation of the step: as many rounds as its busiest replica runs."""
        return max(len(share.run) for share in self.shares)

    @property
    def remainder(self) -> int:
        """Microbatches of a minor; 0 if there is no minor."""
        return max((len(share.run) for share in self.shares if share.role is Role.MINOR), default=0)

    @property
    def spare_work(self) -> int:
        """Microbatches that are run in every step and enter no sum."""
        return sum(len(share.run) for share in self.shares if not share.counts)

    def roles(self) -> Counter[Role]:
        return Counter(share.role for share in self.shares)


@dataclass(frozen=True)
class PolicyDecision(_Shares):
    """The rest of the step, after a loss."""

    restore: RestoreMode
    discarded: int = 0  # microbatches in hand that a boundary step leaves out: spares that do not fit

    @property
    def rounds(self) -> int:
        """Extra rounds: the most microbatches that any one replica still runs."""
        return max(len(share.run) for share in self.shares)

    @property
    def boundary(self) -> bool:
        """Spares could not absorb the loss: survivors run extra microbatches."""
        return self.rounds > 0

    @property
    def full(self) -> int:
        """How many replicas run every extra round; the others run one less."""
        rounds = self.rounds
        return sum(len(share.run) == rounds for share in self.shares) if rounds else 0
