"""Deferred device values: numbers that a device may still be computing, read together where they
are needed.

Reading a value of a device waits for everything that was queued before it. A step does that
once, at its vote, for all values of its microbatches. Torch is imported only once there is a
tensor: the simulated world has plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Numbers = npt.NDArray[Any]
NEAR = ("cpu",)  # types of devices whose memory the host reads directly


class DeviceValue(Generic[T]):
    """The result of `make`, called with a flat array of float64 or int64 for each of some tensors.

    The tensors must not change until that call. Reading `value` before `fetch` waits for these
    tensors only. The tensors of `when_asked` come behind the others; they are queued on the
    device only when they are fetched.
    """

    def __init__(
        self,
        make: Callable[..., T],
        *tensors: torch.Tensor,
        when_asked: Callable[[], Iterable[torch.Tensor]] = lambda: (),
    ) -> None:
        self._tensors, self._when_asked = tensors, when_asked
        self._make: Callable[..., T] | None = make
        self._value: T

    def begin(self) -> Sequence[torch.Tensor]:
        """The tensors to read."""
        self._tensors, self._when_asked = (*self._tensors, *self._when_asked()), lambda: ()
        return self._tensors

    @property
    def value(self) -> T:
        if self._make is not None:
            fetch([self])
        return self._value

    @property
    def known(self) -> bool:
        return self._make is None

    def learn(self, *numbers: Numbers) -> None:
        assert self._make is not None
        self._value = self._make(*numbers)
        self._make, self._tensors = None, ()


def now(value: T | DeviceValue[T]) -> T:
    """The value itself; a plain value is returned unchanged."""
    return value.value if isinstance(value, DeviceValue) else value


def fetch(values: Iterable[object]) -> None:
    """Read all of these values that are not known yet: one transfer from each device, and one wait."""
    laters = list(
        {id(each): each for each in values if isinstance(each, DeviceValue) and not each.known}.values()
    )
    begun = [later.begin() for later in laters]
    read = iter(_read([tensor for tensors in begun for tensor in tensors]))
    for later, tensors in zip(laters, begun, strict=True):
        later.learn(*(next(read) for _ in tensors))


def _read(tensors: list[torch.Tensor]) -> list[Numbers]:
    read: list[Numbers] = [np.zeros(0)] * len(tensors)
    far: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.device.type in NEAR:
            read[index] = _copy(tensor.detach())
        else:
            far.setdefault(tensor.device, []).append(index)
    for indices in far.values():
        for index, numbers in zip(indices, _transfer([tensors[i] for i in indices]), strict=True):
            read[index] = numbers
    return read


def _transfer(tensors: list[torch.Tensor]) -> list[Numbers]:
    """One transfer from one device: float64 are sent as their bits, together with int64."""
    import torch

    kinds: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault(tensor.dtype, []).append(index)
    bits = []
    for kind, members in kinds.items():
        flat = torch.cat([tensors[index].detach().reshape(-1) for index in members])
        bits.append(flat.to(torch.float64 if kind.is_floating_point else torch.int64).view(torch.int64))
    arrived = _to_host(torch.cat(bits)).split([part.numel() for part in bits])
    read: list[Numbers] = [np.zeros(0)] * len(tensors)
    for (kind, members), part in zip(kinds.items(), arrived, strict=True):
        numbers = part.view(torch.float64) if kind.is_floating_point else part
        for index, own in zip(members, numbers.split([tensors[i].numel() for i in members]), strict=True):
            read[index] = own.numpy()
    return read


def _to_host(numbers: torch.Tensor) -> torch.Tensor:
    """Copy through pinned memory: the thread then waits for its own stream only, and holds no lock of
    the driver that another thread may need to abort what the stream waits for."""
    import torch

    if numbers.device.type != "cuda":
        return numbers.cpu()
    there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    there.copy_(numbers, non_blocking=True)
    torch.cuda.current_stream(numbers.device).synchronize()
    return there


def _copy(tensor: torch.Tensor) -> Numbers:
    if not tensor.is_floating_point():
        return tensor.numpy().astype(np.int64).reshape(-1)
    if tensor.itemsize < 4:
        tensor = tensor.float()  # numpy does not have all of these types
    return tensor.numpy().astype(np.float64).reshape(-1)
