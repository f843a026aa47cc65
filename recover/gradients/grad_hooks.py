"""Which parameters tell that their gradient is there.

The host takes each gradient by itself, so each parameter tells. A device is told of a whole bucket at once, so one can
tell for all: the one that comes last, as the first microbatch shows it. To be called costs the host more than to look
whether the others are there, too. Where they come in another order some day, each tells again from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from recover.gradients.bucket_layout import Place


class Tellers:
    """Hooks on the parameters of buckets: `one` is called for a parameter, `bucket` for a whole bucket."""

    def __init__(
        self,
        members: Sequence[Sequence[Place]],
        one: Callable[[Place, torch.nn.Parameter], None],
        bucket: Callable[[int, torch.nn.Parameter], None],
    ) -> None:
        self._members, self._one, self._bucket = members, one, bucket
        self._last: dict[int, Place] = {}  # by bucket
        self._settled, self._each = False, True
        self._unsteady: set[int] = set()  # buckets of which each parameter tells, for good
        self._hooks: list[RemovableHandle] = []

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def came_last(self, place: Place) -> None:
        """The gradients of its bucket are complete, each with a word of its own, and this one was the last."""
        if place.index not in self._last:
            self._last[place.index], self._settled = place, False

    def came_otherwise(self, index: int) -> None:
        """A gradient of this bucket came that nobody told of."""
        if index not in self._unsteady:
            self._unsteady.add(index)
            self._settled = False

    def expect(self, each: bool) -> None:
        """Before a backward pass, or those of a round. `each`: all are to tell. If a parameter has several gradients,
        in a round or by activation checkpointing, autograd adds up those of which nobody tells, and not our sum."""
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

    def _hook(self, place: Place, call: Callable[[torch.nn.Parameter], None]) -> None:
        self._hooks.append(place.parameter.register_post_accumulate_grad_hook(call))
