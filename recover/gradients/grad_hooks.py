"""Hooks by which autograd announces that gradients are complete.

On the host gradients are taken one by one, so each parameter has a hook. On a device those of a
whole bucket are added at once, so one hook per bucket is enough: on the parameter whose gradient
comes last, as the first microbatch shows it. Calling a hook costs the host more than looking whether
the other gradients are there. If they ever come in another order, each parameter of that bucket
has a hook again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from recover.gradients.bucket_layout import BucketSlice


class GradHooks:
    """Hooks on the parameters of buckets: `one` is called for a parameter, `bucket` for a whole
    bucket."""

    def __init__(
        self,
        members: Sequence[Sequence[BucketSlice]],
        one: Callable[[BucketSlice, torch.nn.Parameter], None],
        bucket: Callable[[int, torch.nn.Parameter], None],
    ) -> None:
        self._members, self._one, self._bucket = members, one, bucket
        self._last: dict[int, BucketSlice] = {}  # by bucket
        self._settled, self._each = False, True
        self._unsteady: set[int] = set()  # buckets of which each parameter keeps a hook permanently
        self._handles: list[RemovableHandle] = []

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def came_last(self, place: BucketSlice) -> None:
        """Note that this gradient came last in its bucket, whose gradients are complete, each announced
        by its own hook."""
        if place.index not in self._last:
            self._last[place.index], self._settled = place, False

    def came_otherwise(self, index: int) -> None:
        """Note that a gradient of this bucket came without being announced."""
        if index not in self._unsteady:
            self._unsteady.add(index)
            self._settled = False

    def expect(self, each: bool) -> None:
        """Before a backward pass, or those of a round. `each`: every parameter needs its hook.

        If a parameter gets several gradients (in a round, or by activation checkpointing),
        autograd itself adds up those that are not announced, with other rounding than the sum of
        the bucket.
        """
        if self._settled and each is self._each:
            return
        self.remove()
        self._settled, self._each = True, each
        for index, places in enumerate(self._members):
            if each or index in self._unsteady or index not in self._last:
                for place in places:
                    self._hook(place, partial(self._one, place))
            else:
                self._hook(self._last[index], partial(self._bucket, index))

    def _hook(self, place: BucketSlice, call: Callable[[torch.nn.Parameter], None]) -> None:
        self._handles.append(place.parameter.register_post_accumulate_grad_hook(call))
