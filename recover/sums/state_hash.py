"""A cheap fingerprint of the parameters, so that a replica that has drifted away is found within one step.

All replicas must hold the same bits. Each adds a small hash and its square to a sum that is reduced anyway: the
square of the sum equals the number of replicas times the sum of squares only if all hashes are equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

from recover.sums.later import Later, Numbers
from recover.sums.parts import local_part


@torch.no_grad()
def fingerprint(parameters: Iterable[torch.Tensor], step: int, trained: bytes = b"") -> Later[int]:
    """64 bits over the step counter and all parameters, as they are now. Any single flipped bit changes it.

    `trained` says which of them are: replicas that train different ones must not go on together, either.
    """
    sums: dict[torch.device, list[torch.Tensor]] = {}
    weights: dict[torch.device, list[int]] = {}
    for number, parameter in enumerate(parameters):
        for weight, part in enumerate(_words(local_part(parameter)), start=2 * number + 1):
            if part.numel():  # a sum of nothing would be one more thing for the device to do
                sums.setdefault(part.device, []).append(part.sum(dtype=torch.int64))
                weights.setdefault(part.device, []).append(weight)

    def total(*values: Numbers) -> int:
        weighted = (
            weight * value
            for of_device, there in zip(weights.values(), values, strict=True)
            for weight, value in zip(of_device, there.tolist(), strict=True)
        )
        return (step + zlib.crc32(trained) + sum(weighted)) % 2**64

    return Later(total, *(torch.stack(there) for there in sums.values()))


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
    """All tensors of an optimizer's state, in the order of its parameters."""
    states = (optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"])
    return [
        value for state in states for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)
    ]
