"""The extremes of what was added to the local sums: whether all of it was in range is asked once, at the vote."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from recover.sums.later import Later, Numbers


class Extremes:
    """Those of one step's gradients, on the devices that they were computed on."""

    def __init__(self, bound: float) -> None:
        self._bound = bound
        # By device, and by how many parts the sums are made of that they went into.
        self._seen: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        self._within: Later[bool] | None = None

    def clear(self) -> None:
        self._seen.clear()
        self._within = None

    def note(self, extremes: Iterable[torch.Tensor], parts: int) -> None:
        """Of a gradient that is one of several `parts`, which are added up later: each has its part of the bound."""
        for extreme in extremes:
            self._seen.setdefault((extreme.device, parts), []).append(extreme)
            self._within = None

    def fold(self) -> None:
        """A microbatch is through: what is kept of it is two numbers, not two for each parameter."""
        for key, seen in self._seen.items():
            if len(seen) > 2:
                self._seen[key] = list(torch.aminmax(torch.stack(seen)))  # NaN stays

    @property
    def within(self) -> Later[bool]:
        """Whether all of them are within the bound."""
        if self._within is None:
            limits = [self._bound / parts for (_, parts), seen in self._seen.items() for _ in seen]
            seen = [extreme for each in self._seen.values() for extreme in each]

            def within(*numbers: Numbers) -> bool:  # NaN is not
                return all(abs(float(n[0])) < limit for n, limit in zip(numbers, limits, strict=True))

            self._within = Later(within, *seen)
        return self._within
