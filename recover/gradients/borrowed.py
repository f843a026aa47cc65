"""Gradients that somebody keeps: an optimizer the last one, say, or a hook of it. In a plain loop they are its own.

Here they lie in memory that the next step sums into. Who keeps them may do so anywhere and from any step on, so it is
found out by how many hold on to that memory, before it was lent and after.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from recover.gradients.bucket_layout import Place
from recover.gradients.buckets import Bucket


class Lent:
    """The results of some buckets, cut into gradients."""

    def __init__(self, buckets: Sequence[Bucket], members: Sequence[Sequence[Place]]) -> None:
        self._members = members
        self._before = [(bucket, self._others(index, bucket)) for index, bucket in enumerate(buckets)]

    def kept(self) -> list[Bucket]:
        """They were given back: those whose memory somebody still holds, the gradient itself or a view of it."""
        return [
            bucket
            for index, (bucket, before) in enumerate(self._before)
            if self._others(index, bucket) > before
            or any(
                place.seen is not None and _references(place.seen) > _OURS for place in self._members[index]
            )
        ]

    def _others(self, index: int, bucket: Bucket) -> int:
        """Tensors in the memory of its result, beside the gradients that we keep cut."""
        ours = sum(
            place.seen is not None and place.seen[0] is bucket.result for place in self._members[index]
        )
        return _sharing(bucket.result) - ours


def _sharing(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _references(seen: tuple[torch.Tensor, torch.Tensor]) -> int:
    """To the second of them. What this call itself adds differs between versions of Python."""
    return sys.getrefcount(seen[1])


_OURS = _references((torch.empty(0), torch.empty(0)))
