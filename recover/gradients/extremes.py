"""Extremes of the gradients in the local sums, parameter by parameter. They stay on their devices
until the vote reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from recover.gradients.deferred import DeviceValue, Numbers


class Extremes:
    """Extremes of one step's gradients, on the devices that computed them. Each belongs to a kind
    of values, by the number of its exponent."""

    def __init__(self) -> None:
        # Of the microbatch in progress, by device, and of those before, by device and kinds.
        self._new: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        self._pieces = Counter[int]()  # of the gradient of each kind in that microbatch
        self._seen: dict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = {}
        self._largest: DeviceValue[Numbers] | None = None

    def clear(self) -> None:
        self._new.clear()
        self._pieces.clear()
        self._seen.clear()
        self._largest = None

    def note(self, extremes: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Note extremes of one gradient for each of some kinds; a kind may have several extremes."""
        if extremes:
            self._new.setdefault(extremes[0][1].device, []).extend(extremes)
            self._pieces.update({kind for kind, _ in extremes})
            self._largest = None

    def fold(self, is_round: bool = False) -> None:
        """After a microbatch: keep one tensor. Mostly all microbatches have the same kinds in the
        same order, and so share it.

        A gradient that has come in several pieces (reentrant checkpointing of shared weights) has
        as many words in the sum, and may be as many times as large as its largest piece. In a
        round, the pieces are the gradients of its microbatches.
        """
        for device, noted in self._new.items():
            kinds, tensors = zip(*noted, strict=True)
            found = torch.stack(tensors).abs_()
            if not is_round and max(pieces := [self._pieces[kind] for kind in kinds]) > 1:
                found = found * torch.tensor(pieces, dtype=torch.float64, device=device)
            before = self._seen.get((device, kinds))
            # `maximum` keeps a NaN.
            self._seen[device, kinds] = found if before is None else torch.maximum(before, found)
        self._new.clear()
        self._pieces.clear()

    @property
    def largest(self) -> DeviceValue[Numbers]:
        """The largest magnitude of each kind up to the highest one that was noted; infinity where
        any value is not finite."""
        if self._largest is None:
            self.fold()
            kinds = [np.array(kinds) for _, kinds in self._seen]

            def largest(*numbers: Numbers) -> Numbers:
                found = np.zeros(1 + max((int(each.max()) for each in kinds), default=-1))
                for where, magnitudes in zip(kinds, numbers, strict=True):
                    np.maximum.at(found, where, np.nan_to_num(magnitudes, nan=np.inf, posinf=np.inf))
                return found

            self._largest = DeviceValue(largest, *self._seen.values())
        return self._largest
