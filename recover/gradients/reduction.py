"""Arithmetic of sums: fast, or reproducible, with bits that do not depend on the order or on the
number of replicas.

`fast`          Sums in float32, or in float64 for float64 parameters. The last bits depend on the order of
                the additions, and so on the number of replicas.
`reproducible`  Every microbatch's gradient is rounded to a grid: a power of two times integers, which words of 64 bits
                (float64) or of 32 bits (int32) carry and add without error. The grid of a parameter follows from B and
                from what was committed before (`recover.gradients.exponents`), so runs with and without failures, on
                any number of replicas, get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from recover.gradients import deferred
from recover.gradients.exponents import LOSSES, Exponents
from recover.gradients.parts import on_device
from recover.gradients.word_checksum import WordChecksum

Reduction = Literal["fast", "reproducible"]
Bits = Literal[64, 32]
Tensors = list[torch.Tensor]
Noted = list[tuple[int, torch.Tensor]]
DOUBLE = (torch.float64, torch.complex128)
WORD = {64: torch.float64, 32: torch.int32}
PIECE = 1 << 16  # numbers that the host rounds at a time: they stay in its cache


class Sum(Protocol):
    """The arithmetic of a bucket. `kinds`: the exponents of some slices, by their numbers; a fast sum
    does not look at them."""

    exact: bool  # independent of the order: autograd must not add up gradients before it

    @property
    def exponents(self) -> Exponents | None:
        """Exponents of an exact sum; None for a fast one."""

    def dtype_for(self, parameters: torch.dtype) -> torch.dtype:
        """The type in which gradients of such parameters are summed."""

    def add(
        self,
        kinds: Sequence[int],
        places: Tensors,
        gradients: Tensors,
        first: bool,
        checksum: WordChecksum | None = None,
    ) -> Noted:
        """Add one microbatch's gradients to their slices (the first ones overwrite). `checksum`: of
        the words that an exact sum adds.

        Returns their extremes as tensors that are not read yet, if the sum is exact.
        """

    def units(self, kinds: Sequence[int]) -> list[float]:
        """The value of 1 in each of these slices."""

    def mean(
        self, result: torch.Tensor, kinds: Sequence[int], sizes: Sequence[int], weight: float, shrink: float
    ) -> torch.Tensor:
        """The gradients for the optimizer, from the reduced sum of a bucket with slices of these
        sizes. Its memory is that of the sum, or new."""

    def loss(self, value: float) -> float:
        """The value by which a loss enters the sum."""

    def change(self, values: torch.Tensor, names: Sequence[str], sizes: Sequence[int]) -> torch.Tensor:
        """The values by which changes of running buffers of these sizes (float64) enter the sum."""


class FastSum:
    exact = False
    exponents = None

    def dtype_for(self, parameters: torch.dtype) -> torch.dtype:
        return torch.float64 if parameters in DOUBLE else torch.float32

    def add(
        self,
        kinds: Sequence[int],
        places: Tensors,
        gradients: Tensors,
        first: bool,
        checksum: WordChecksum | None = None,
    ) -> Noted:
        if first:
            torch._foreach_copy_(places, gradients)
        else:
            torch._foreach_add_(places, gradients)
        return []  # infinities and NaNs are found in the reduced sum

    def units(self, kinds: Sequence[int]) -> list[float]:
        return [1.0] * len(kinds)

    def mean(
        self, result: torch.Tensor, kinds: Sequence[int], sizes: Sequence[int], weight: float, shrink: float
    ) -> torch.Tensor:
        return result.mul_(shrink / weight)

    def loss(self, value: float) -> float:
        return value

    def change(self, values: torch.Tensor, names: Sequence[str], sizes: Sequence[int]) -> torch.Tensor:
        return values


class ReproducibleSum:
    """Exact sums of rounded gradients. `bits`: of the words in which gradients are summed."""

    exact = True

    def __init__(self, global_batch: int, bits: int = 64) -> None:
        self.exponents = Exponents(global_batch, words=bits)
        self._word = WORD[bits]
        self._grids: tuple[tuple[float, ...], torch.Tensor] | None = None
        # Memory of the host for one piece: scaled, and as integers.
        self._scaled, self._integers = _piece(0, torch.float32), _piece(0, self._word)

    def units(self, kinds: Sequence[int]) -> list[float]:
        found: list[float] = self.exponents.grids[list(kinds)].tolist()
        return found

    def dtype_for(self, parameters: torch.dtype) -> torch.dtype:
        if parameters in DOUBLE:
            raise ValueError(
                f"reduction='reproducible' rounds each gradient to float32, and a parameter is {parameters}; "
                "use float32 parameters, or reduction='fast', which sums float64"
            )
        return self._word

    def add(
        self,
        kinds: Sequence[int],
        places: Tensors,
        gradients: Tensors,
        first: bool,
        checksum: WordChecksum | None = None,
    ) -> Noted:
        some = [at for at, gradient in enumerate(gradients) if gradient.numel()]
        if not some:
            return []
        kinds, places = [kinds[at] for at in some], [places[at] for at in some]
        gradients, factors = (
            [gradients[at].float() for at in some],
            [1.0 / unit for unit in self.units(kinds)],
        )
        if gradients[0].device.type not in deferred.NEAR:
            return self._add_together(kinds, places, gradients, factors, first, checksum)
        extremes: Noted = []
        for kind, place, gradient, factor in zip(kinds, places, gradients, factors, strict=True):
            pieces = zip(gradient.reshape(-1).split(PIECE), place.view(-1).split(PIECE), strict=True)
            for number, (source, target) in enumerate(pieces):
                extremes += ((kind, extreme) for extreme in torch.aminmax(source))
                words = self._add_piece(target, source, factor, first)
                if checksum is not None:  # while they are in the cache
                    checksum.add(kind, words, number * PIECE)
        return extremes

    def _add_piece(
        self, place: torch.Tensor, gradient: torch.Tensor, factor: float, first: bool
    ) -> torch.Tensor:
        """Add the gradients on the host. Scaling is exact: the factor is a power of two, and float32 values
        from 2^24 on are integers. It writes to memory of its own: the memory of a gradient may belong
        to another gradient as well, be used again by autograd, or be kept by the user. Returns what was
        added, in memory that the next piece uses again."""
        size = gradient.numel()
        if self._scaled.numel() < size:
            self._scaled, self._integers = _piece(PIECE, torch.float32), _piece(PIECE, self._word)
        scaled = torch.mul(gradient, factor, out=self._scaled[:size]).round_()
        if first:
            place.copy_(scaled)
        elif self._word is torch.int32:
            place.add_(self._integers[:size].copy_(scaled))
        else:
            place.add_(scaled)
        return scaled

    def _add_together(
        self,
        kinds: Sequence[int],
        places: Tensors,
        gradients: Tensors,
        factors: list[float],
        first: bool,
        checksum: WordChecksum | None,
    ) -> Noted:
        """Add the gradients on a device, in few kernels for all of them."""
        extremes = list(zip(kinds, torch._foreach_norm(gradients, math.inf), strict=True))
        scaled = torch._foreach_mul(gradients, factors)
        torch._foreach_round_(scaled)
        if checksum is not None:
            for kind, words in zip(kinds, scaled, strict=True):
                checksum.add(kind, words)
        if first:
            torch._foreach_copy_(places, scaled)
            return extremes
        if self._word is torch.int32:
            sizes = [each.numel() for each in scaled]
            flat = torch.empty(sum(sizes), dtype=self._word, device=scaled[0].device)
            integers = [part.view(each.shape) for part, each in zip(flat.split(sizes), scaled, strict=True)]
            torch._foreach_copy_(integers, list(scaled))
            torch._foreach_add_(places, integers)
        else:
            torch._foreach_add_(places, scaled)
        return extremes

    def mean(
        self, result: torch.Tensor, kinds: Sequence[int], sizes: Sequence[int], weight: float, shrink: float
    ) -> torch.Tensor:
        units = self.units(kinds)
        if result.dtype is torch.int32:
            gradient = result.view(torch.float32).copy_(result)
            torch._foreach_mul_(gradient.split(list(sizes)), [unit * shrink / weight for unit in units])
            return gradient
        torch._foreach_mul_(result.split(list(sizes)), [unit / weight for unit in units])
        gradient = result.float()  # rounded to fp32 once
        return gradient if shrink == 1.0 else gradient.mul_(shrink)

    def loss(self, value: float) -> float:
        grid = float(self.exponents.grids[LOSSES])
        scaled = value / grid
        return round(scaled) * grid if math.isfinite(scaled) else scaled

    def change(self, values: torch.Tensor, names: Sequence[str], sizes: Sequence[int]) -> torch.Tensor:
        index = self.exponents.index_of("buffers")
        grids = tuple(self.units([index[name] for name in names]))
        if self._grids is None or self._grids[0] != grids:
            each = torch.tensor(grids, dtype=torch.float64).repeat_interleave(torch.tensor(sizes))
            self._grids = grids, on_device(each, values.device)
        grid = self._grids[1]
        return (values / grid).round_().mul_(grid)


def _piece(numbers: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host, whatever type and device the user has made torch's default."""
    return torch.empty(numbers, dtype=dtype, device="cpu")


def make_sum(name: str, global_batch: int, bits: int = 64) -> Sum:
    if name == "fast":
        return FastSum()
    if name == "reproducible":
        return ReproducibleSum(global_batch, bits)
    raise ValueError(f"reduction={name!r} is not known; choose 'fast' or 'reproducible'")
