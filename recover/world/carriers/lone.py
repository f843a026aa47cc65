"""The carrier of a world of one: the sum over one replica is its own value.

Data stay where they are.
"""

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
        """There are no peers."""

    def free(self) -> None:
        """No thread is ever blocked."""

    def all_reduce(self, source: Data, out: Data) -> None:
        if out is not source:
            _copy(source, out)

    def all_max(self, data: Data) -> None:
        """The maximum over one replica is its own value."""

    def broadcast(self, data: Data, root: int) -> None:
        """The root is the only member."""

    def all_gather(self, source: Data, out: Data) -> None:
        _copy(source, out[0])

    def exchange(self, out: Mapping[int, Data], into: Mapping[int, Data]) -> None:
        """There are no peers."""

    def barrier(self) -> None:
        """The only member is here."""


def _copy(source: Data, out: Data) -> None:
    if isinstance(out, np.ndarray):
        out[...] = source
    else:
        out.detach().copy_(source.detach())
        Ready(out).wait()
