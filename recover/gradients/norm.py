"""The norm of the reduced gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from recover.gradients.buckets import Bucket
from recover.gradients.deferred import DeviceValue, Numbers

PIECE = 1 << 16  # numbers


def squared_norms(buckets: Sequence[Bucket], parts: int = 1) -> list[float]:
    """Squared norms of the parts of the gradient, over the buckets of each, read in one transfer;
    0 if a reduction failed.

    A device is asked for it before its reductions have finished, so that it continues without
    the host. If one of them fails afterwards, the value is not used.
    """
    if not all(bucket.is_coming() for bucket in buckets):
        return [0.0] * parts
    copies = torch.tensor([bucket.copies for bucket in buckets], dtype=torch.float64)

    def totals(*norms: Numbers) -> list[float]:
        squares = torch.from_numpy(np.concatenate(norms)).square() / copies
        if parts == 1:
            return [float(squares.sum())]
        each = torch.tensor([bucket.part for bucket in buckets])
        return [float(squares[each == part].sum()) for part in range(parts)]

    return DeviceValue(totals, *(_norm(bucket.result) for bucket in buckets)).value


def _norm(result: torch.Tensor) -> torch.Tensor:
    """In pieces on the host: one running sum would grow too large for the small squares added to
    it."""
    if result.device.type != "cpu" or result.numel() <= PIECE:
        return torch.linalg.vector_norm(result)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(result.split(PIECE))))
