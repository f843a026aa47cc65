"""The carrier of a world of one: a sum over one replica is what that replica has. Data stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from recover.world.carriers.base import Data, DataCarrier, DataCarriers, Ready
from recover.world.carriers.worker import Worker


class LoneCarriers(DataCarriers):
    settle = 0.0

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def make(self, members: tuple[int, ...]) -> LoneCarrier:
        return LoneCarrier(self._worker, members, members[0])


class LoneCarrier(DataCarrier):
    def offer(self) -> bytes:
        return b""

    def connect(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        """To nobody."""

    def free(self) -> None:
        """Nobody is blocked."""

    def all_reduce(self, source: Data, out: Data) -> None:
        if out is not source:
            _copy(source, out)

    def all_max(self, data: Data) -> None:
        """The maximum over one is what that one has."""

    def broadcast(self, data: Data, root: int) -> None:
        """The one who has it is the one who gets it."""

    def all_gather(self, source: Data, out: Data) -> None:
        _copy(source, out[0])

    def exchange(self, out: Mapping[int, Data], into: Mapping[int, Data]) -> None:
        """There is nobody to exchange anything with."""

    def barrier(self) -> None:
        """All are here."""


def _copy(source: Data, out: Data) -> None:
    if isinstance(out, np.ndarray):
        out[...] = source
    else:
        out.detach().copy_(source.detach())
        Ready(out).wait()
