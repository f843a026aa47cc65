"""Carriers among virtual ranks: real arrays are summed, and a death may be met by some members and not by others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from recover.carriers.base import Array, DataCarrier, DataCarriers, Ready
from recover.carriers.contract import CarrierError
from recover.carriers.worker import Worker
from recover.fabrics.simulated import SimulatedFabric, Simulation


class SimulatedCarriers(DataCarriers):
    """`sick` ranks of the simulation cannot make theirs, or not build it, from some try to another."""

    settle = 0.002

    def __init__(self, simulation: Simulation, fabric: SimulatedFabric, worker: Worker) -> None:
        self._simulation, self._fabric, self._worker = simulation, fabric, worker
        self._made = 0

    def make(self, members: tuple[int, ...]) -> SimulatedCarrier:
        self._made += 1
        first, last, can_be_made = self._simulation.sick.get(self._fabric.rank, (0, -1, True))
        is_sick = first <= self._made <= last
        if is_sick and not can_be_made:
            raise OSError("no socket is left")
        return SimulatedCarrier(self._simulation, self._fabric, self._worker, members, is_sick)


class SimulatedCarrier(DataCarrier):
    def __init__(
        self,
        simulation: Simulation,
        fabric: SimulatedFabric,
        worker: Worker,
        members: tuple[int, ...],
        is_sick: bool,
    ) -> None:
        super().__init__(worker, simulation.grid.peers(fabric.rank, members), fabric.rank)
        self._simulation, self._fabric, self._is_sick = simulation, fabric, is_sick
        self._key = (
            fabric.holds,
            self.peers,
        )  # the same on all of them: they have made it after the same agreement
        self._operations = 0
        self._alarmed: Callable[[], bool] = lambda: False

    def offer(self) -> bytes:
        return b"%d" % self._fabric.rank

    def build(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        self._alarmed = alarmed  # nobody frees a wait for the dead while it is built, but who waits sees it
        super().build(offers, confirm, alarmed)
        self._alarmed = lambda: False
        if self._is_sick:
            raise CarrierError("the trial sum took for ever")

    def connect(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        for rank, offer in offers.items():
            assert offer == b"%d" % rank, "the census mixed up its rows"
        someone_died = not set(self._simulation.dead).isdisjoint(offers)
        if not confirm(not (someone_died and self._simulation.rng.random() < 0.5)):
            raise CarrierError("the constructor failed somewhere")

    def free(self) -> None:
        self._simulation.revoked.add(self._key)

    def all_reduce(self, source: Array, out: Array, ready: Ready) -> None:
        out[...] = np.sum(self._exchange(source), axis=0)

    def broadcast(self, data: Array, root: int, ready: Ready) -> None:
        data[...] = self._exchange(data)[root]

    def all_gather(self, source: Array, out: Array, ready: Ready) -> None:
        out[...] = self._exchange(source)

    def barrier(self) -> None:
        self._exchange(np.zeros(1))

    def _exchange(self, mine: Array) -> list[Array]:
        """What every peer brings, in their order."""
        self._operations += 1
        parts = self._simulation.reductions.setdefault((self._key, self._operations), {})
        parts[self._fabric.rank] = mine.copy()
        peers = set(self.peers)

        def freed() -> bool:
            return self._key in self._simulation.revoked

        self._fabric.wait("in a reduction", lambda: parts.keys() >= peers or freed() or self._alarmed())
        hit = freed() or not peers.isdisjoint(self._simulation.dead)
        if not parts.keys() >= peers or (hit and self._simulation.rng.random() < 0.5):
            self.free()
            raise CarrierError("the reduction was hit by a death")
        sizes = {part.shape for part in parts.values()}
        assert len(sizes) == 1, f"operations of different sizes have met: {sizes}"
        return [parts[rank] for rank in self.peers]
