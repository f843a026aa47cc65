"""The norm of the reduced gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from recover.gradients.buckets import Bucket
from recover.gradients.deferred import DeviceValue, Numbers

PIECE = 1 << 16  # numbers
Slices = tuple[Sequence[int], Sequence[float]]  # sizes, and the value of 1 in each


def squared_norms(buckets: Sequence[Bucket], parts: int = 1, slices: Sequence[Slices] = ()) -> list[float]:
    """Squared norms of the parts of the gradient, over the buckets of each, read in one transfer;
    0 if a reduction failed.

    `slices`: of each bucket, if they have units of their own. Their norms are taken one by one, so
    that the bits do not depend on how slices are packed into buckets.

    On a device the norms are queued before the reductions have finished, so that it continues
    without the host. If a reduction fails afterwards, the value is not used.
    """
    if not all(bucket.is_coming() for bucket in buckets):
        return [0.0] * parts
    if slices:
        cut = [_norms_of_slices(bucket.result, *each) for bucket, each in zip(buckets, slices, strict=True)]
    else:
        cut = [(_norm(bucket.result).view(1), [1.0]) for bucket in buckets]
    units = np.concatenate([each for _, each in cut])
    numbers = [len(each) for _, each in cut]
    copies, part_of = (
        torch.tensor([getattr(bucket, name) for bucket in buckets]).repeat_interleave(torch.tensor(numbers))
        for name in ("copies", "part")
    )

    def totals(*norms: Numbers) -> list[float]:
        squares = torch.from_numpy(np.concatenate(norms) * units).square() / copies
        if parts == 1:
            return [float(squares.sum())]
        return [float(squares[part_of == part].sum()) for part in range(parts)]

    return DeviceValue(totals, *(norms for norms, _ in cut)).value


def _norms_of_slices(
    result: torch.Tensor, sizes: Sequence[int], units: Sequence[float]
) -> tuple[torch.Tensor, list[float]]:
    """The norm of each slice, in pieces on the host, and the units of these norms."""
    near = result.device.type == "cpu"
    if not near and not result.is_floating_point():
        result = result.float()
    pieces, of_pieces = [], []
    for part, unit in zip(result.split(list(sizes)), units, strict=True):
        cut = [piece for piece in (part.split(PIECE) if near else [part]) if piece.numel()]
        pieces += cut
        of_pieces += [unit] * len(cut)
    if not pieces:
        return result.new_zeros(0, dtype=torch.float64), []
    if not result.is_floating_point():  # one by one, in memory that stays in the cache
        room = result.new_empty(PIECE, dtype=torch.float32)  # torch's default type may be another one
        norms = [torch.linalg.vector_norm(room[: piece.numel()].copy_(piece)) for piece in pieces]
        return torch.stack(norms), of_pieces
    return torch.stack(torch._foreach_norm(pieces)), of_pieces


def _norm(result: torch.Tensor) -> torch.Tensor:
    """The norm, in pieces on the host: one running sum would grow too large for the small squares added to
    it."""
    if result.device.type != "cpu" or result.numel() <= PIECE:
        return torch.linalg.vector_norm(result)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(result.split(PIECE))))
