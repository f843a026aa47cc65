"""How gradients are summed: fast, or so that the sum does not depend on who computed what, in which order, or how many.

`fast`          fp32 sums, of float64 parameters float64 ones. The last bits depend on the order of the additions, and
                so on the number of replicas.
`reproducible`  Every microbatch's gradient is scaled by a power of two and rounded to integers, which float64 carries
                and adds without error. The scale follows from B alone, so runs with and without failures, on any
                number of replicas, get the same bits.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

import torch

from recover.sums import later

Reduction = Literal["fast", "reproducible"]
Tensors = list[torch.Tensor]
DOUBLE = (torch.float64, torch.complex128)


class Sum(Protocol):
    """The arithmetic of a bucket."""

    unit: float  # what 1.0 in a bucket stands for
    bound: float  # gradients must stay within +- this
    exact: bool  # it does not depend on the order, so nobody else may add up gradients beside it

    def dtype_for(self, parameters: torch.dtype) -> torch.dtype:
        """What the gradients of such parameters are summed in."""

    def add(self, places: Tensors, gradients: Tensors, first: bool) -> Tensors:
        """Add one microbatch's gradients to their places (the first ones overwrite).

        Returns their extremes, not read yet, if there is a bound to them: beyond it the sum is of no use.
        """

    def mean(self, result: torch.Tensor, weight: float, shrink: float) -> torch.Tensor:
        """The gradient for the optimizer, from the reduced sum."""

    def loss(self, value: float) -> float:
        """A loss as it is summed."""

    def change(self, values: torch.Tensor) -> torch.Tensor:
        """Changes of buffers, in float64, as they are summed: in the unit of losses."""

    def covers(self, loss: float) -> bool:
        """Whether such a loss (or change) can be summed as promised."""

    loss_unit: float

    def explain(self, step: int) -> str:
        """Why a step cannot be summed."""


class FastSum:
    exact = False
    unit = 1.0
    bound = math.inf
    loss_unit = 1.0

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

    def change(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def covers(self, loss: float) -> bool:
        return True

    def explain(self, step: int) -> str:
        raise AssertionError("a fast sum has no range")


class ReproducibleSum:
    exact = True

    def __init__(self, global_batch: int) -> None:
        self._global_batch = global_batch
        self.exponent = 48 - math.ceil(math.log2(global_batch))
        self.unit = 2.0**-self.exponent
        self.loss_unit = 2.0 ** -(self.exponent - 8)  # losses up to 2^12 or so, whatever B
        self.bound = 2.0 ** (53 - self.exponent) / global_batch

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
        # Exact: a power of two, and integers from 2^24 on. Into memory of our own: that of a gradient may be another
        # gradient's, too, or flow on in autograd, or be kept by the user.
        scaled = torch._foreach_mul(gradients, 2.0**self.exponent)
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
        scaled = value / self.loss_unit
        return float(round(scaled)) if math.isfinite(scaled) else scaled

    def change(self, values: torch.Tensor) -> torch.Tensor:
        return (values / self.loss_unit).round_()

    def covers(self, loss: float) -> bool:
        return abs(loss) < 2.0**53 / self._global_batch  # False for NaN

    def explain(self, step: int) -> str:
        return (
            f"step {step}: the gradient or the loss of a microbatch, or what it changed in a buffer, is not finite, or "
            "too large to be summed exactly "
            f"over {self._global_batch} microbatches (a gradient must stay within +-{self.bound:g}); "
            "lower the learning rate, look at the data, or set reduction=fast"
        )


def _extremes(tensors: Tensors) -> Tensors:
    """Some numbers that are as far from zero as anything in these, NaN if that is there: whichever come soonest."""
    if tensors[0].device.type in later.NEAR:
        return [extreme for tensor in tensors for extreme in torch.aminmax(tensor)]
    return list(torch._foreach_norm(tensors, math.inf))


def make_sum(name: str, global_batch: int) -> Sum:
    if name == "fast":
        return FastSum()
    if name == "reproducible":
        return ReproducibleSum(global_batch)
    raise ValueError(f"reduction={name!r} is not known; choose 'fast' or 'reproducible'")
