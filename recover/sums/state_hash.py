"""A cheap fingerprint of the parameters, so that a replica that has drifted away is found within one step.

All replicas must hold the same bits. Each adds a small hash and its square to a sum that is reduced anyway: the
square of the sum equals the number of replicas times the sum of squares only if all hashes are equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

from recover.sums.parts import local_part


def fingerprint(parameters: Iterable[torch.Tensor], step: int, trained: bytes = b"") -> int:
    """64 bits over the step counter and all parameters. Any single flipped bit changes it.

    `trained` says which of them are: replicas that train different ones must not go on together, either.
    """
    sums = []
    for parameter in parameters:
        raw = local_part(parameter.detach()).contiguous().view(-1).view(torch.uint8)
        if raw.storage_offset() % 8:
            raw = raw.clone()  # a view that does not start at a whole number
        whole = raw.numel() // 8 * 8
        sums.append(raw[:whole].view(torch.int64).sum())
        sums.append(raw[whole:].sum(dtype=torch.int64))
    total = step + zlib.crc32(trained)
    for weight, value in enumerate(torch.stack([s.to(sums[0].device) for s in sums]).tolist(), start=1):
        total += weight * value
    return total % 2**64


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors of an optimizer's state, in the order of its parameters."""
    states = (optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"])
    return [
        value for state in states for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)
    ]
