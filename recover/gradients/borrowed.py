"""Gradients that the optimizer borrows: their memory belongs to buckets that the next step sums
into.

An optimizer, or a hook of it, may keep the gradients that it was given; in a plain loop they are
its own. It may do so anywhere and from any step on, so the number of references to that memory
is compared before and after the optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from recover.gradients.bucket_layout import ModuleBucket
from recover.gradients.buckets import Bucket


class BorrowedGradients:
    """The results of some buckets, cut into gradients."""

    def __init__(self, buckets: Sequence[ModuleBucket]) -> None:
        self._before = [(each, _others(each)) for each in buckets]

    def kept(self) -> list[Bucket]:
        """After the optimizer: buckets whose memory is still referred to, by a gradient itself or by a
        view of it."""
        return [
            each.bucket
            for each, before in self._before
            if _others(each) > before
            or any(place.seen is not None and _references(place.seen) > _OURS for place in each.slices)
        ]


def _others(each: ModuleBucket) -> int:
    """Number of tensors in the memory of the result, not counting the cached gradients."""
    mean = each.mean_in_result
    ours = sum(place.seen is not None and place.seen[0] is mean for place in each.slices)
    return _sharing(each.bucket.result) - ours


def _sharing(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _references(seen: tuple[torch.Tensor, torch.Tensor]) -> int:
    """Number of references to the second tensor. The references that this call itself adds
    differ between versions of Python."""
    return sys.getrefcount(seen[1])


_OURS = _references((torch.empty(0), torch.empty(0)))
