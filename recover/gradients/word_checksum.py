"""Checksums of the words of exact sums, by which errors in adding and reducing are found.

Words are integers, so a checksum that is linear in them adds up as they do: the checksum of a
reduced sum equals the sum of the checksums of all that was added to it, modulo 2^64. Each word is
multiplied by an odd weight that follows from its parameter and its position in it. So one changed
word always changes the checksum, whichever bits of it have flipped, and words that were exchanged,
lost or added twice change it as well, but for a chance of about 2^-40 or less.
"""

from __future__ import annotations

import torch

from recover.gradients import deferred
from recover.gradients.deferred import DeviceValue, Numbers
from recover.gradients.gradient_hash import LOW, odd_number, weighted_sum

ROW = 1 << 12  # words of a parameter that form one row: weights are kept for a row and for a column
PIECE = {True: 1 << 16, False: 1 << 24}  # words that are converted at a time, on the host and on a device
LIMB, LIMBS = 16, 4  # a checksum as numbers that several ranks can add up in any type of words


class WordChecksum:
    """A running checksum of words that are added to a sum. Values are read from a device later."""

    def __init__(self) -> None:
        self._sums: dict[torch.device, torch.Tensor] = {}

    def clear(self) -> None:
        self._sums.clear()

    @torch.no_grad()
    def add(self, kind: int, words: torch.Tensor, first: int = 0) -> None:
        """Add words of the parameter with this number, from word `first` on (a multiple of `ROW`)."""
        if words.numel():
            self._put(_sum_of_words(words.reshape(-1), first) * odd_number(str(kind)))

    def limbs(self, device: torch.device) -> torch.Tensor:
        """The checksum so far, which is all on this device, as small numbers that ranks can add up."""
        total = self._sums.get(device, torch.zeros((), dtype=torch.int64, device=device))
        return torch.stack([total >> LIMB * at & (1 << LIMB) - 1 for at in range(LIMBS)])

    def add_limbs(self, limbs: torch.Tensor) -> None:
        """Add checksums of several ranks, summed limb by limb."""
        for at, limb in enumerate(limbs.to(torch.int64).unbind()):
            self._put(limb << LIMB * at)

    def value(self) -> DeviceValue[int]:
        """The checksum of everything added so far."""

        def total(*values: Numbers) -> int:
            return sum(int(value[0]) for value in values) & LOW

        return DeviceValue(total, *self._sums.values())

    def _put(self, total: torch.Tensor) -> None:
        before = self._sums.get(total.device)
        self._sums[total.device] = total if before is None else before + total


def are_whole(words: torch.Tensor) -> torch.Tensor:
    """Whether all of these are integers. A flipped bit may leave a fraction, which a checksum of
    integers does not see; words of 32 bits cannot hold one."""
    if not words.is_floating_point():
        return torch.ones((), dtype=torch.int64, device=words.device)
    near = words.device.type in deferred.NEAR
    pieces = [(piece == piece.trunc()).all() for piece in words.split(PIECE[near])]
    return torch.stack(pieces).all().to(torch.int64)


def _sum_of_words(words: torch.Tensor, first: int) -> torch.Tensor:
    """The sum of these words, each times the weights of its row and column."""
    size = PIECE[words.device.type in deferred.NEAR]
    total: torch.Tensor | None = None
    for start in range(0, words.numel(), size):
        integers = words[start : start + size].to(torch.int64)
        row, whole = (first + start) // ROW, integers.numel() // ROW * ROW
        for part, at in (
            (integers[:whole].view(-1, ROW), row),
            (integers[whole:].view(1, -1), row + whole // ROW),
        ):
            if part.numel():
                found = weighted_sum(part, (at,))
                total = found if total is None else total + found
    assert total is not None
    return total
