"""The part of a carrier that membership uses: make an offer, build, free. Nothing about data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar


class CarrierError(Exception):
    """A carrier could not be built, or an operation on it failed or was freed."""


class UnreachedError(CarrierError):
    """Members that this rank could not reach: `ranks`, with their addresses."""

    def __init__(self, text: str, ranks: Mapping[int, str]) -> None:
        named = ", ".join(f"rank {rank} at {where}" for rank, where in sorted(ranks.items()))
        super().__init__(f"{text}: no answer from {named}")
        self.ranks = tuple(sorted(ranks))


class TookTooLongError(CarrierError):
    """This member waited for others in vain: the fault is not its own."""


class Carrier(Protocol):
    """Moves the data of one epoch among the members. Each epoch has a new one."""

    def offer(self) -> bytes:
        """Data that the other members need to build the carrier, such as addresses."""

    def build(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        """Build the carrier and try it once. Raises CarrierError.

        `confirm(ok)` is an agreement: True if all members passed True. All members must call it
        equally often. `alarmed()` says that a member has died: then a wait for that member must end.
        """

    def free(self) -> None:
        """Wake all threads that are blocked in an operation. Any thread may call this.

        The carrier cannot be used afterwards.
        """


C_made = TypeVar("C_made", bound=Carrier, covariant=True)


class Carriers(Protocol[C_made]):
    """Makes the carrier of an epoch.

    `settle`: seconds without a notice of a death before the carrier may be built, unless all other
    ranks show that they live; 0 if a death does no harm meanwhile.
    """

    settle: float

    def make(self, members: tuple[int, ...]) -> C_made: ...
