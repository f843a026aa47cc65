"""Extremes of the gradients in the local sums. They stay on their devices until the vote reads
them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from recover.gradients.deferred import DeviceValue, Numbers


class Extremes:
    """Extremes of one step's gradients, on the devices that computed them."""

    def __init__(self) -> None:
        # By device, and by the number of partners over which the sum is added up.
        self._seen: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        self._largest: DeviceValue[float] | None = None

    def clear(self) -> None:
        self._seen.clear()
        self._largest = None

    def note(self, extremes: Iterable[torch.Tensor], parts: int) -> None:
        """Note the extremes of a gradient. If it is one of several `parts` that are added up, it
        counts that many times."""
        for extreme in extremes:
            self._seen.setdefault((extreme.device, parts), []).append(extreme)
            self._largest = None

    def fold(self) -> None:
        """After a microbatch: keep two numbers, not two for each parameter."""
        for key, seen in self._seen.items():
            if len(seen) > 2:
                self._seen[key] = list(torch.aminmax(torch.stack(seen)))  # NaN stays

    @property
    def largest(self) -> DeviceValue[float]:
        """The largest magnitude; infinity if any value is not finite."""
        if self._largest is None:
            parts = [parts for (_, parts), seen in self._seen.items() for _ in seen]
            seen = [extreme for each in self._seen.values() for extreme in each]

            def largest(*numbers: Numbers) -> float:
                found = [abs(float(n[0])) * count for n, count in zip(numbers, parts, strict=True)]
                return max(found, default=0.0) if all(map(math.isfinite, found)) else math.inf

            self._largest = DeviceValue(largest, *seen)
        return self._largest
