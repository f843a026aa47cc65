"""Carriers among virtual ranks: real arrays are summed, and a death may fail an operation on some members only."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from recover.world.carriers.base import Array, Data, DataCarrier, DataCarriers
from recover.world.carriers.contract import CarrierError, UnreachedError
from recover.world.carriers.worker import Worker
from recover_lab.simulated_world.scheduler import SimulatedFabric, Simulation


class SimulatedCarriers(DataCarriers):
    """Carriers of one virtual rank. If the rank is one of the `sick` ranks of the simulation, making or building the
    carrier fails at some tries."""

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
        )  # the same on all members: they have made it after the same agreement
        self._operations = 0
        self._is_built = False
        self._alarmed: Callable[[], bool] = lambda: False

    def offer(self) -> bytes:
        return b"%d" % self._fabric.rank

    def build(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        # During the build no thread frees a wait for a dead rank, but the waiting rank polls this.
        self._alarmed = alarmed
        super().build(offers, confirm, alarmed)
        self._alarmed = lambda: False
        if self._is_sick:
            raise CarrierError("the trial sum took for ever")
        if silent := self._unreached():
            raise UnreachedError("the group was given up", dict.fromkeys(silent, "its address"))
        self._is_built = True

    def _unreached(self) -> set[int]:
        """The peers that do not reach this rank."""
        mine, peers = self._fabric.rank, set(self.peers)
        return {rank for link in self._simulation.broken_links if mine in link for rank in link & peers} - {
            mine
        }

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

    def all_reduce(self, source: Data, out: Data) -> None:
        _array(out)[...] = np.sum(self._exchange(_array(source)), axis=0)

    def all_max(self, data: Data) -> None:
        _array(data)[...] = np.max(self._exchange(_array(data)), axis=0)

    def broadcast(self, data: Data, root: int) -> None:
        _array(data)[...] = self._exchange(_array(data))[root]

    def all_gather(self, source: Data, out: Data) -> None:
        _array(out)[...] = self._exchange(_array(source))

    def exchange(self, out: Mapping[int, Data], into: Mapping[int, Data]) -> None:
        self._fabric.reach("passing on")
        if self._simulation.torn.get(self._fabric.rank, 0) > 0:
            self._simulation.torn[self._fabric.rank] -= 1
            self.free()
            raise CarrierError("the connection was torn")
        for peer, data in out.items():
            self._wire(self._fabric.rank, self.peers[peer]).append(_array(data).copy())

        def there() -> bool:
            return all(self._wire(self.peers[peer], self._fabric.rank) for peer in into)

        self._fabric.wait("receiving", lambda: there() or self._is_freed() or self._alarmed())
        hit = self._is_freed() or not set(self.peers).isdisjoint(self._simulation.dead)
        if not there() or (hit and self._simulation.rng.random() < 0.5):
            self.free()
            raise CarrierError("what was passed on was hit by a death")
        for peer, data in into.items():
            _array(data)[...] = self._wire(self.peers[peer], self._fabric.rank).pop(0)

    def _wire(self, sender: int, receiver: int) -> list[Array]:
        wire: list[Array] = self._simulation.reductions.setdefault((self._key, sender, receiver), [])
        return wire

    def _is_freed(self) -> bool:
        return self._key in self._simulation.revoked and not self._simulation.is_cut_off(self._fabric.rank)

    def barrier(self) -> None:
        self._exchange(np.zeros(1))

    def _exchange(self, mine: Array) -> list[Array]:
        """Contributions of all peers, in their order."""
        self._operations += 1
        self._fabric.reach("in a reduction")
        parts = self._simulation.reductions.setdefault((self._key, self._operations), {})
        parts[self._fabric.rank] = mine.copy()
        peers = set(self.peers)

        self._fabric.wait(
            "in a reduction", lambda: parts.keys() >= peers or self._is_freed() or self._alarmed()
        )
        if self._is_built and self._unreached():
            self.free()
            raise CarrierError("no byte has travelled")
        hit = self._is_freed() or not peers.isdisjoint(self._simulation.dead)
        if not parts.keys() >= peers or (hit and self._simulation.rng.random() < 0.5):
            self.free()
            raise CarrierError("the reduction was hit by a death")
        sizes = {part.shape for part in parts.values()}
        assert len(sizes) == 1, f"operations of different sizes have met: {sizes}"
        return [parts[rank] for rank in self.peers]


def _array(data: Data) -> Array:
    """The memory of a tensor, or the array itself."""
    return data if isinstance(data, np.ndarray) else data.detach().numpy()
