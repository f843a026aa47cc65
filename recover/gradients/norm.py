"""The norm of what the buckets hold when they are reduced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from recover.gradients.buckets import Bucket
from recover.gradients.deferred import DeviceValue, Numbers

PIECE = 1 << 16  # numbers


def squared_norm(buckets: Sequence[Bucket]) -> float:
    """Read at once, whatever their number. A device is asked for it before its sums are through, so that it goes on
    from them without a word of the host. If one of them fails it is of no account."""
    if not all(bucket.is_coming() for bucket in buckets):
        return 0.0
    copies = torch.tensor([bucket.copies for bucket in buckets], dtype=torch.float64)

    def total(*norms: Numbers) -> float:
        return float((torch.from_numpy(np.concatenate(norms)).square() / copies).sum())

    return DeviceValue(total, *(_norm(bucket.result) for bucket in buckets)).value


def _norm(result: torch.Tensor) -> torch.Tensor:
    """By pieces: on a host all squares would be added to one number, which grows too large for the small ones."""
    if result.device.type != "cpu" or result.numel() <= PIECE:
        return torch.linalg.vector_norm(result)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(result.split(PIECE))))
