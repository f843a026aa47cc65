"""The interface for injected faults: the code announces where it is, and nothing happens unless a
job asks for faults.

`recover.faults.probe` implements it. World and step use this interface only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol


class Hooks(Protocol):
    step: int  # set by the step loop, from 1
    coming: Callable[[], Collection[int]]  # replicas that ask to join or are being admitted
    came: Collection[int]  # replicas that are in their first step

    def __call__(self, location: str, detail: object = None) -> None:
        """The rank is at this location."""

    def under_way(self, location: str, work: Any = None, detail: object = None) -> None:
        """An operation (`work`, of the communication thread) was started here and is not awaited
        yet."""

    def beside(self, location: str) -> None:
        """The rank is about to wait here without a limit."""

    def dealt(self, slots: Mapping[int, Iterable[int]]) -> None:
        """A step begins, with these slots for each replica."""

    def reading(self, slot: int) -> None:
        """The sample of this slot is about to be read."""

    def computed(self, took: Callable[[], float]) -> None:
        """A microbatch, or a round, was computed. Calling `took` waits for the device."""

    def watch(self, model: Any, gradients: Any) -> None:
        """Pass the tensors that faults may damage."""


class NoHooks:
    """No faults."""

    step = 0
    coming: Callable[[], Collection[int]] = tuple
    came: Collection[int] = ()

    def __call__(self, location: str, detail: object = None) -> None:
        pass

    def under_way(self, location: str, work: Any = None, detail: object = None) -> None:
        pass

    def beside(self, location: str) -> None:
        pass

    def dealt(self, slots: Mapping[int, Iterable[int]]) -> None:
        pass

    def reading(self, slot: int) -> None:
        pass

    def computed(self, took: Callable[[], float]) -> None:
        pass

    def watch(self, model: Any, gradients: Any) -> None:
        pass
