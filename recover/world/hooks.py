"""The places where a fault may strike: code says where it is, and nothing happens unless a job asks for faults.

`recover.faults.probe` has the hooks that strike. World and step know of this seam only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol


class Hooks(Protocol):
    step: int  # set by whoever counts steps (from 1)
    coming: Callable[[], Collection[int]]  # the replicas that ask to join or are being let in
    came: Collection[int]  # those for which this step is the first

    def __call__(self, location: str, detail: object = None) -> None:
        """The rank is at this place now."""

    def under_way(self, location: str, work: Any = None, detail: object = None) -> None:
        """Something has been started here (`work`, of the communication thread) and is not waited for yet."""

    def beside(self, location: str) -> None:
        """The rank is about to wait here, for as long as it takes."""

    def dealt(self, slots: Mapping[int, Iterable[int]]) -> None:
        """A step begins, with these slots for each replica."""

    def reading(self, slot: int) -> None:
        """The sample of this slot is about to be read."""

    def computed(self, took: Callable[[], float]) -> None:
        """A microbatch, or a round, was computed; to ask how long that took is to wait for its device."""

    def watch(self, model: Any, gradients: Any) -> None:
        """These are the tensors that there are to be damaged."""


class NoHooks:
    """Nothing strikes."""

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
