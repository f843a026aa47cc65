"""Fingerprint of the gradient of one microbatch, by which two replicas compare what they computed.

The sum of the bits of all elements, each times an odd weight, modulo 2^64. The weight of an element
is the product of a number for its parameter and one for each of its coordinates in the whole
parameter. So any flipped bit changes the sum, and the sum depends neither on the order in which
gradients arrive, nor on how parameters are packed into buckets; the fingerprints of the shards of a
parameter add up to that of the whole. A gradient that arrives in several pieces counts as their sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch

from recover.gradients import deferred
from recover.gradients.deferred import DeviceValue, Numbers
from recover.gradients.parts import as_real

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
LOW = (1 << 64) - 1


class GradientHash:
    """64 bits over the gradients that are added to it. Values are read from a device later."""

    def __init__(self, name: Callable[[torch.nn.Parameter], str]) -> None:
        self._name = name
        self._sums: dict[torch.device, list[torch.Tensor]] = {}

    @torch.no_grad()
    def add(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Add the gradient of this rank's part of a parameter."""
        if not gradient.numel():
            return
        number = odd_number(self._name(parameter))
        total = weighted_sum(gradient, offsets_of(parameter)) * number
        self._sums.setdefault(total.device, []).append(total)

    @torch.no_grad()
    def add_value(self, name: str, value: torch.Tensor) -> None:
        """Add a further result of the microbatch, such as its loss."""
        total = weighted_sum(value.detach(), ()) * odd_number(name)
        self._sums.setdefault(total.device, []).append(total)

    def value(self) -> DeviceValue[int]:
        """The hash of everything added so far."""
        totals = [torch.stack(sums).sum() for sums in self._sums.values()]

        def total(*values: Numbers) -> int:
            return sum(int(value[0]) for value in values) & LOW

        return DeviceValue(total, *totals)


def weighted_sum(values: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    """The sum of the bits of these values, each times the weights of its coordinates. `offsets`:
    the coordinates of the first one in the whole tensor; by default 0."""
    values = as_real(values)
    bits = values.view(_BITS[values.element_size()])
    bits = bits.reshape(1) if bits.dim() == 0 else bits
    starts = [*offsets, *[0] * (bits.dim() - len(offsets))]
    for axis in reversed(range(bits.dim())):
        size, start = bits.shape[axis], starts[axis]
        weights = _weights(axis, 1 << (start + size - 1).bit_length(), bits.device)[start : start + size]
        if bits.device.type in deferred.NEAR:
            # Several times faster than torch, which writes all products to memory.
            summed = np.einsum("...i,i->...", bits.numpy(), weights.numpy())
            bits = torch.from_numpy(np.asarray(summed))
        else:
            bits = (bits * weights).sum(-1)
    return bits


def offsets_of(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Coordinates of this rank's part of a sharded parameter in the whole; () for a plain one."""
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return ()
    return _offsets(tuple(parameter.shape), parameter.device_mesh, tuple(placements))  # type: ignore[attr-defined]


@lru_cache(maxsize=4096)
def _offsets(shape: tuple[int, ...], mesh: object, placements: tuple[object, ...]) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)  # type: ignore[arg-type]
    return tuple(offsets)


@lru_cache(maxsize=4096)
def odd_number(name: str) -> int:
    """An odd number of 64 bits for a parameter, as a signed one."""
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) | 1
    return number - (1 << 64) if number >> 63 else number


@lru_cache(maxsize=256)
def _weights(axis: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers of 64 bits for the first `count` coordinates of an axis (splitmix64)."""
    with np.errstate(over="ignore"):
        mixed = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(axis << 40)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy((mixed | np.uint64(1)).view(np.int64)).to(device)
