"""Two carriers as one: data on a GPU travel by the carrier of the device, data on the host by the
carrier of the host.

The small sums of a vote are made and read on the host. By way of the GPU they would queue behind
all gradients, once for each copy and once for the sum; this way they travel while gradients are
still summed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from recover.world.carriers.base import Data, DataCarrier, DataCarriers, Ready
from recover.world.carriers.contract import CarrierError
from recover.world.carriers.nccl import NcclCarrier, NcclCarriers
from recover.world.carriers.worker import Completion, Worker

_MARK, _LENGTH = b"nccl:", struct.Struct("<q")


def _parts(rank: int, offer: bytes) -> tuple[bytes, bytes]:
    """The offers of a member for the device's carrier and for the host's."""
    if not offer.startswith(_MARK):
        raise CarrierError(
            f"rank {rank} has chosen another carrier than nccl (its host has fewer GPUs than ranks, or none): give it "
            "GPUs, or set --carrier on all hosts"
        )
    (length,), rest = _LENGTH.unpack_from(offer, len(_MARK)), offer[len(_MARK) + _LENGTH.size :]
    return rest[:length], rest[length:]


class HostAndDeviceCarriers(DataCarriers):
    def __init__(self, device: NcclCarriers, host: DataCarriers, worker: Worker) -> None:
        self._device, self._host, self._worker = device, host, worker
        self.settle = max(device.settle, host.settle)
        self.writes_remotely = device.writes_remotely or host.writes_remotely

    def warm_up(self) -> None:
        self._device.warm_up()

    def make(self, members: tuple[int, ...]) -> HostAndDevice:
        host = self._host.make(members)
        try:
            device = self._device.make(members)
        except BaseException:
            host.free()
            raise
        return HostAndDevice(device, host, self._worker)


class HostAndDevice(DataCarrier):
    ends_cleanly = NcclCarrier.ends_cleanly

    def __init__(self, device: NcclCarrier, host: DataCarrier, worker: Worker) -> None:
        super().__init__(worker, device.peers, device.peers[device.index])
        self._device, self._host = device, host

    @property
    def carried(self) -> int:
        return self._device.carried + self._host.carried

    def offer(self) -> bytes:
        of_device = self._device.offer()
        return _MARK + _LENGTH.pack(len(of_device)) + of_device + self._host.offer()

    def connect(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        """Build and try the host's carrier, then the device's.

        NCCL cannot see that a member does not come, and waits for long. So it is tried only after
        all members have confirmed the host's carrier.
        """
        try:
            parts = {rank: _parts(rank, offer) for rank, offer in offers.items()}
            # The carrier whose build contains agreements goes first: a member that fails in the
            # other one would otherwise be missing in those agreements.
            self._host.build({rank: of_host for rank, (_, of_host) in parts.items()}, confirm, alarmed)
        except Exception:
            confirm(False)
            raise
        if not confirm(True):
            raise CarrierError("the carrier of the host was not built everywhere")
        self._device.build({rank: of_device for rank, (of_device, _) in parts.items()}, confirm, alarmed)

    def free(self) -> None:
        self._device.free()
        self._host.free()

    def retire(self) -> None:
        self._device.retire()
        self._host.retire()

    def follow(self, ready: Ready) -> None:
        self._device.follow(ready)  # data with events are on a device, and travel by its carrier

    def all_reduce(self, source: Data, out: Data) -> Completion | None:
        return self._wire(source, out).all_reduce(source, out)

    def all_max(self, data: Data) -> Completion | None:
        return self._wire(data).all_max(data)

    def broadcast(self, data: Data, root: int) -> Completion | None:
        return self._wire(data).broadcast(data, root)

    def all_gather(self, source: Data, out: Data) -> Completion | None:
        return self._wire(source, out).all_gather(source, out)

    def exchange(self, out: Mapping[int, Data], into: Mapping[int, Data]) -> Completion | None:
        return self._wire(*out.values(), *into.values()).exchange(out, into)

    def barrier(self) -> Completion | None:
        return self._host.barrier()

    def _wire(self, *data: Data) -> DataCarrier:
        """The device's carrier if any of the data is on a GPU."""
        return self._device if any(map(self._device.holds, data)) else self._host
