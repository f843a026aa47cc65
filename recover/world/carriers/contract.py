"""What membership asks of a carrier: an offer, to be built, to be freed. Nothing about data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar


class CarrierError(Exception):
    """A carrier could not be built, or an operation on it failed or was freed."""


class UnreachedError(CarrierError):
    """Other members did not answer this one: `ranks`, by how it tried to reach them."""

    def __init__(self, text: str, ranks: Mapping[int, str]) -> None:
        named = ", ".join(f"rank {rank} at {where}" for rank, where in sorted(ranks.items()))
        super().__init__(f"{text}: no answer from {named}")
        self.ranks = tuple(sorted(ranks))


class TookTooLongError(CarrierError):
    """It was waited for others, who did not come: the fault is not this member's."""


class Carrier(Protocol):
    """What moves the data of one epoch among the members, made anew for each epoch."""

    def offer(self) -> bytes:
        """What the other members must know before the carrier can be built (addresses, say)."""

    def build(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        """Build and try it once. Raises CarrierError.

        `confirm(ok)` is an agreement: True if it went well everywhere; all members must call it equally often.
        `alarmed()` says that a member has died, so that a wait for it must be given up.
        """

    def free(self) -> None:
        """Free whoever is blocked in an operation, from any thread. The carrier is of no use afterwards."""


C_made = TypeVar("C_made", bound=Carrier, covariant=True)


class Carriers(Protocol[C_made]):
    """Makes the carrier of an epoch. `settle`: how long no new death must be noticed before it is built."""

    settle: float

    def make(self, members: tuple[int, ...]) -> C_made: ...
