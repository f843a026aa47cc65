"""A cheap fingerprint of the parameters, so that a replica that has drifted away is found within one step.

All replicas must hold the same bits. Each adds a small hash and its square to a sum that is reduced anyway: the
square of the sum equals the number of replicas times the sum of squares only if all hashes are equal.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from recover.sums.later import Later, Numbers
from recover.sums.parts import local_part


class StateHash:
    """64 bits over the step counter and all tensors that are added, as they are then. Any flipped bit changes it.

    `trained` says which of them are: replicas that train different ones must not go on together, either.
    """

    def __init__(self, step: int, trained: bytes = b"") -> None:
        self._start = step + zlib.crc32(trained)
        self._added = 0
        self._sums: dict[torch.device, list[torch.Tensor]] = {}
        self._weights: dict[torch.device, list[int]] = {}

    @torch.no_grad()
    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            for weight, part in enumerate(_words(local_part(tensor)), start=2 * self._added + 1):
                if part.numel():  # a sum of nothing would be one more thing for the device to do
                    self._sums.setdefault(part.device, []).append(part.sum(dtype=torch.int64))
                    self._weights.setdefault(part.device, []).append(weight)
            self._added += 1

    def value(self, when_asked: Callable[[], Iterable[torch.Tensor]] = lambda: ()) -> Later[int]:
        """Of all that was added so far, and of these, as they are when somebody asks."""

        def begin() -> Iterable[torch.Tensor]:
            self.add(when_asked())
            return [torch.stack(there) for there in self._sums.values()]

        def total(*values: Numbers) -> int:
            weighted = (
                weight * value
                for of_device, there in zip(self._weights.values(), values, strict=True)
                for weight, value in zip(of_device, there.tolist(), strict=True)
            )
            return (self._start + sum(weighted)) % 2**64

        return Later(total, when_asked=begin)


def fingerprint(tensors: Iterable[torch.Tensor], step: int, trained: bytes = b"") -> Later[int]:
    """The hash of these alone, as they are now."""
    whole = StateHash(step, trained)
    whole.add(tensors)
    return whole.value()


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a tensor holds as numbers of 8 bytes, and the bytes left over behind them, if there are any."""
    flat = tensor.contiguous().view(-1)
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()  # a view that does not start at a whole number
    over = flat.numel() * flat.itemsize % 8
    if not over:
        return (flat.view(torch.int64),)
    raw = flat.view(torch.uint8)
    return raw[:-over].view(torch.int64), raw[-over:]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors of an optimizer's state, nested ones included, in the order of its parameters."""
    states = (optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"])
    return [tensor for state in states for tensor in _tensors_in(state)]


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for _, each in sorted(value.items(), key=lambda item: (str(item[0]), type(item[0]).__name__)):
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


def parameters_digest(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Over the bytes of all parameters, whole, in the order of their names."""
    digest = hashlib.sha256()
    for _, parameter in parameters:
        digest.update(parameter.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
