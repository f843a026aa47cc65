"""The record of one repair: which ranks were lost or joined, and what it cost the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from recover.job.grid import Grid
from recover.policy import RestoreMode
from recover.world.census import Census


@dataclass
class Incident:
    step: int
    epoch: int
    dead_ranks: tuple[int, ...]
    dead_replicas: tuple[int, ...]
    complete: bool  # every survivor held the whole sum already: the step was committed unchanged
    boundary: bool
    restore: RestoreMode
    extra_microbatches: int  # run again, over all survivors
    discarded_microbatches: int  # run by survivors, and left out of the sum
    noticed_at: float  # time.time() at which this rank noticed it
    noticed_in: str  # the place in the step: advance, backward, in-reduce, vote or extra
    detect_ms: float  # from the notice until the repair: the share is finished first
    repair_ms: float
    restore_ms: float = 0.0
    redo_ms: float = 0.0
    evicted: tuple[int, ...] = ()  # replicas that the others removed
    reasons: dict[int, str] = field(default_factory=dict)  # why, by replica
    wrong_sums: tuple[
        str, ...
    ] = ()  # ranks whose reduced sums were wrong, although all local sums were right
    # Replicas that left on notice, after a committed step: no microbatch is run again for them.
    left_ranks: tuple[int, ...] = ()
    left_replicas: tuple[int, ...] = ()
    # Replicas that joined and hold the state now, if any.
    joined_ranks: tuple[int, ...] = ()
    joined_replicas: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()  # where they run
    warm_up_ms: float = 0.0  # from the start of a process until it asked to join; the longest
    transfer_ms: float = 0.0
    transfer_bytes: int = 0  # to each joining rank; of this shard
    joining_steps: int = 0  # steps over which the state was handed over in instalments; 0: in one pause
    stall_ms: float = 0.0  # time in which the members did not compute; includes repair and transfer

    def to_json(self) -> dict[str, Any]:
        """The form in which members send it to a joining rank."""
        return asdict(self) | {"restore": self.restore.value, "reasons": list(self.reasons.items())}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Incident:
        """The incident that a member has sent."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in told.items()
        }
        values |= {"restore": RestoreMode(told["restore"]), "reasons": dict(told["reasons"])}
        return cls(**values)

    @property
    def kind(self) -> str:
        return "joined" if self.joined_ranks else "left" if self.left_ranks else "lost"

    @property
    def gone_ranks(self) -> tuple[int, ...]:
        """Ranks that were lost, and ranks that left."""
        return (*self.dead_ranks, *self.left_ranks)


@dataclass(frozen=True)
class Losses:
    """The members that one repair, or several in a row, have gone on without."""

    lost: tuple[int, ...] = ()  # ranks
    left: tuple[int, ...] = ()  # ranks that left on notice
    evicted: Mapping[int, str] = field(default_factory=dict)  # replicas that the others removed, and why

    @classmethod
    def of(cls, census: Census) -> Losses:
        return cls(census.lost, census.left, census.unreached)

    def __add__(self, other: Losses) -> Losses:
        return Losses(self.lost + other.lost, self.left + other.left, {**self.evicted, **other.evicted})

    def __bool__(self) -> bool:
        return bool(self.lost or self.left)


def incident_of(
    step: int,
    grid: Grid,
    census: Census,
    losses: Losses,
    noticed_at: float,
    noticed_in: str = "advance",
    detect_ms: float = 0.0,
    complete: bool = True,
) -> Incident:
    """The incident of a repair, before it is known how the step goes on."""
    return Incident(
        step=step,
        epoch=census.epoch,
        dead_ranks=losses.lost,
        dead_replicas=grid.replicas_of(losses.lost),
        complete=complete,
        boundary=False,
        restore=RestoreMode.SKIP,
        extra_microbatches=0,
        discarded_microbatches=0,
        noticed_at=noticed_at,
        noticed_in=noticed_in,
        detect_ms=detect_ms,
        repair_ms=census.seconds * 1e3,
        evicted=tuple(sorted(losses.evicted)),
        reasons=dict(losses.evicted),
        left_ranks=tuple(sorted(losses.left)),
        left_replicas=grid.replicas_of(losses.left),
    )
