"""Arithmetic of sums: fast, or reproducible, with bits that do not depend on the order or on the
number of replicas.

`fast`          fp32 sums, of float64 parameters float64 ones. The last bits depend on the order of the additions, and
                so on the number of replicas.
`reproducible`  Every microbatch's gradient is rounded to a grid: a power of two times integers, which float64 carries
                and adds without error. The grid follows from B and from what was committed before
                (`recover.gradients.exponents`), so runs with and without failures, on any number of replicas, get
                the same bits.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

import torch

from recover.gradients import deferred
from recover.gradients.exponents import BUFFERS, GRADIENTS, LOSSES, Exponents
from recover.gradients.parts import on_device

Reduction = Literal["fast", "reproducible"]
Tensors = list[torch.Tensor]
DOUBLE = (torch.float64, torch.complex128)


class Sum(Protocol):
    """The arithmetic of a bucket."""

    exact: bool  # independent of the order: autograd must not add up gradients before it

    @property
    def exponents(self) -> Exponents | None:
        """Exponents of an exact sum; None for a fast one."""

    @property
    def unit(self) -> float:
        """The value of 1.0 in a bucket."""

    def dtype_for(self, parameters: torch.dtype) -> torch.dtype:
        """The type in which gradients of such parameters are summed."""

    def add(self, places: Tensors, gradients: Tensors, first: bool) -> Tensors:
        """Add one microbatch's gradients to their slices (the first ones overwrite).

        Returns their extremes as tensors that are not read yet, if the sum is exact.
        """

    def mean(self, result: torch.Tensor, weight: float, shrink: float) -> torch.Tensor:
        """The gradient for the optimizer, from the reduced sum."""

    def loss(self, value: float) -> float:
        """The value by which a loss enters the sum."""

    def change(self, values: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """The values by which changes of running buffers of these sizes (float64) enter the sum."""


class FastSum:
    exact = False
    exponents = None
    unit = 1.0

    def dtype_for(self, parameters: torch.dtype) -> torch.dtype:
        return torch.float64 if parameters in DOUBLE else torch.float32

    def add(self, places: Tensors, gradients: Tensors, first: bool) -> Tensors:
        if first:
            torch._foreach_copy_(places, gradients)
        else:
            torch._foreach_add_(places, gradients)
        return []  # infinities and NaNs are found in the reduced sum

    def mean(self, result: torch.Tensor, weight: float, shrink: float) -> torch.Tensor:
        return result.mul_(shrink / weight)

    def loss(self, value: float) -> float:
        return value

    def change(self, values: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        return values


class ReproducibleSum:
    exact = True

    def __init__(self, global_batch: int) -> None:
        self.exponents = Exponents(global_batch)
        self._grids: tuple[tuple[float, ...], torch.Tensor] | None = None

    @property
    def unit(self) -> float:
        return self.exponents.grid(GRADIENTS)

    def dtype_for(self, parameters: torch.dtype) -> torch.dtype:
        if parameters in DOUBLE:
            raise ValueError(
                f"reduction='reproducible' rounds each gradient to float32, and a parameter is {parameters}; "
                "use float32 parameters, or reduction='fast', which sums float64"
            )
        return torch.float64

    def add(self, places: Tensors, gradients: Tensors, first: bool) -> Tensors:
        gradients = [gradient.float() for gradient in gradients]
        some = [gradient for gradient in gradients if gradient.numel()]
        extremes = _extremes(some) if some else []
        # Exact: the factor is a power of two, and float32 from 2^24 on are integers. Into new
        # memory: the memory of a gradient may belong to another gradient as well, be used again by
        # autograd, or be kept by the user.
        scaled = torch._foreach_mul(gradients, 1.0 / self.unit)
        torch._foreach_round_(scaled)
        if first:
            torch._foreach_copy_(places, scaled)
        else:
            torch._foreach_add_(places, scaled)
        return extremes

    def mean(self, result: torch.Tensor, weight: float, shrink: float) -> torch.Tensor:
        gradient = result.mul_(self.unit).div_(weight).float()  # rounded to fp32 once
        return gradient if shrink == 1.0 else gradient.mul_(shrink)

    def loss(self, value: float) -> float:
        grid = self.exponents.grid(LOSSES)
        scaled = value / grid
        return round(scaled) * grid if math.isfinite(scaled) else scaled

    def change(self, values: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        grids = tuple(self.exponents.grid(BUFFERS + number) for number in range(len(sizes)))
        if self._grids is None or self._grids[0] != grids:
            each = torch.tensor(grids, dtype=torch.float64).repeat_interleave(torch.tensor(sizes))
            self._grids = grids, on_device(each, values.device)
        grid = self._grids[1]
        return (values / grid).round_().mul_(grid)


def _extremes(tensors: Tensors) -> Tensors:
    """Numbers with the largest magnitude in these tensors, NaN if there is one, by the fastest
    way of the device."""
    if tensors[0].device.type in deferred.NEAR:
        return [extreme for tensor in tensors for extreme in torch.aminmax(tensor)]
    return list(torch._foreach_norm(tensors, math.inf))


def make_sum(name: str, global_batch: int) -> Sum:
    if name == "fast":
        return FastSum()
    if name == "reproducible":
        return ReproducibleSum(global_batch)
    raise ValueError(f"reduction={name!r} is not known; choose 'fast' or 'reproducible'")
