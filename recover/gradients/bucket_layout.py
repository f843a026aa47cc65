"""Flat buckets for the gradients of a module: how parameters are cut into runs, and where each
gradient lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recover.gradients.buckets import Bucket
from recover.gradients.deferred import DeviceValue
from recover.gradients.parts import as_gradient, as_real, local_part, on_device, own_gradient
from recover.gradients.replica_interface import Partners
from recover.gradients.word_checksum import LIMBS, WordChecksum


@dataclass(eq=False, slots=True)
class BucketSlice:
    """The slice of a bucket (or of its tray) that holds one parameter's gradient."""

    parameter: torch.nn.Parameter
    index: int  # of the bucket
    kind: int  # the number of its exponent, if the sum is exact
    room: torch.Tensor
    seen: tuple[torch.Tensor, torch.Tensor] | None = None  # the last mean, and the gradient in it

    def gradient_in(self, mean: torch.Tensor, is_kept: bool) -> torch.Tensor:
        """The parameter's gradient in the mean of a whole bucket.

        Mostly that is the same tensor in every step (`is_kept`), so it is cached: a device is idle
        until the optimizer runs, and every call for a parameter counts.
        """
        if self.seen is not None and self.seen[0] is mean:
            return self.seen[1]
        room = self.room
        part = mean.as_strided(room.shape, room.stride(), room.storage_offset())
        gradient = as_gradient(self.parameter, part)
        if gradient is part and is_kept:  # otherwise it was made for this step alone
            self.seen = mean, gradient
        return gradient


class ModuleBucket:
    """A bucket with the slices of its parameters, and which of them the step and its microbatch
    have filled.

    partners:       ranks of the replica that hold the same parameters: gradients are gathered in a tray, and added up
                    over the partners after each round
    adds_together:  gradients are added when all of the bucket are there (on a device), not one by one
    """

    def __init__(
        self,
        index: int,
        bucket: Bucket,
        parameters: Sequence[torch.nn.Parameter],
        kinds: Sequence[int],
        partners: Partners | None,
        adds_together: bool,
    ) -> None:
        self.index, self.bucket, self.adds_together = index, bucket, adds_together
        self._partners = partners
        filled = bucket.local
        if partners is not None:
            # Behind the gradients, one mark for each parameter: whether any partner has used it; and
            # the checksum of the words that this rank adds.
            filled = self._tray = bucket.local.new_zeros(bucket.local.numel() + len(parameters) + LIMBS)
        self._tray_checksum = WordChecksum()
        self.slices: list[BucketSlice] = []
        self.kinds, self.sizes = kinds, [room_for(parameter).numel() for parameter in parameters]
        at = 0
        for parameter, kind, size in zip(parameters, kinds, self.sizes, strict=True):
            shape = room_for(parameter).shape
            self.slices.append(BucketSlice(parameter, index, kind, filled[at : at + size].view(shape)))
            at += size
        # The mean of the last step, if it was made in the memory of the result.
        self.mean_in_result: torch.Tensor | None = None
        self.taken: dict[BucketSlice, torch.Tensor] = {}  # gradients that are not in the sum yet
        self.touched: set[BucketSlice] = set()  # slices that hold a sum; others are overwritten, not added to
        self.used: set[BucketSlice] = set()  # slices that any microbatch of the step has used
        self.seen: set[BucketSlice] = set()  # slices that the microbatch in progress has used
        self.used_by_partners: DeviceValue[set[BucketSlice]] | None = None
        self._holds_trays = False  # trays of earlier rounds are in the local sum

    def clear(self) -> None:
        """Drop the sum of this step."""
        self.taken.clear()
        self.touched.clear()
        self.used.clear()
        self.used_by_partners = None
        self._holds_trays = False
        self._tray_checksum.clear()

    @property
    def has_tray(self) -> bool:
        return self._partners is not None

    @property
    def parts(self) -> int:
        """Number of ranks whose gradients are added up to one."""
        return 1 if self._partners is None else self._partners.size

    def keep_if_in_result(self, mean: torch.Tensor) -> torch.Tensor:
        """The mean of this step; if it is in the memory of the result, the same tensor as in the
        steps before."""
        if mean.data_ptr() != self.bucket.result.data_ptr():
            self.mean_in_result = None
            return mean
        kept = self.mean_in_result
        if kept is None or kept.data_ptr() != mean.data_ptr():
            kept = self.mean_in_result = mean
        return kept

    @property
    def is_full(self) -> bool:
        """Whether the microbatch in progress has used all parameters."""
        return len(self.seen) == len(self.slices)

    def take(self, places: Sequence[BucketSlice]) -> None:
        """Move the gradients of these parameters out of `p.grad`."""
        for place in places:
            gradient = place.parameter.grad
            self.taken[place] = gradient if type(gradient) is torch.Tensor else own_gradient(place.parameter)
            place.parameter.grad = None
        self.seen.update(places)

    def complete_sum(self) -> None:
        """Before the bucket is posted: gradients of parameters that no microbatch has used are zero."""
        if self._partners is None:
            self._fill_up()
        elif not self._holds_trays:
            self.bucket.local.zero_()
            self._holds_trays = True

    def checksum_for(self, checksum: WordChecksum | None) -> WordChecksum | None:
        """The checksum of words that are added to the slices: that of the local sum or, where a
        tray gathers them first, that of the tray."""
        return checksum if checksum is None or self._partners is None else self._tray_checksum

    def add_up_tray(self, checksum: WordChecksum | None = None) -> None:
        """Add the gradients of a round, summed over the partners, to the local sum, and their
        checksums to `checksum`. A collective of the partners."""
        if self._partners is None:
            return
        local, tray = self.bucket.local, self._tray
        self._fill_up()
        used = [float(place in self.used) for place in self.slices]
        _, marks, limbs = tray.split([local.numel(), len(used), LIMBS])
        marks.copy_(on_device(torch.tensor(used, dtype=tray.dtype), tray.device))
        if checksum is not None:
            limbs.copy_(self._tray_checksum.limbs(tray.device))
        self._partners.add_up(tray)
        if checksum is not None:
            checksum.add_limbs(limbs)
            self._tray_checksum.clear()
        if self._holds_trays:
            local.add_(tray[: local.numel()])
        else:
            local.copy_(tray[: local.numel()])
            self._holds_trays = True
        self.used_by_partners = marked(self.slices, marks)
        self.touched.clear()

    def checksum_of(self, words: torch.Tensor) -> WordChecksum:
        """The checksum of the words of a whole bucket: of its local sum, or of its result."""
        checksum = WordChecksum()
        for kind, part in zip(self.kinds, words.split(self.sizes), strict=True):
            checksum.add(kind, part)
        return checksum

    def _fill_up(self) -> None:
        for place in self.slices:
            if place not in self.touched:
                place.room.zero_()
                self.touched.add(place)


def marked(places: Sequence[BucketSlice], marks: torch.Tensor) -> DeviceValue[set[BucketSlice]]:
    """Slices whose marks are not zero. Every partner marks all that it has used in the step so
    far, so the marks of the last round cover the rounds before it."""
    return DeviceValue(lambda marked: {p for p, mark in zip(places, marked, strict=True) if mark}, marks)


def room_for(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A tensor of the shape that this rank's part of the gradient takes in a bucket."""
    return as_real(local_part(parameter.detach()))


def cut(parameters: list[torch.nn.Parameter], limit: int) -> list[list[torch.nn.Parameter]]:
    """Cut parameters into runs of at most `limit` numbers, or of one parameter that has more."""
    runs: list[list[torch.nn.Parameter]] = []
    filled = limit
    for parameter in parameters:
        size = room_for(parameter).numel()
        if not runs or (filled and filled + size > limit):
            runs.append([])
            filled = 0
        runs[-1].append(parameter)
        filled += size
    return runs
