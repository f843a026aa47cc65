"""Microbatches in flight: handed to the user's loop, with their backward still to come.

They are read and seeded here, shown on the board of the host, and blamed if this rank dies over
them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from recover.gradients import deferred
from recover.gradients.deferred import DeviceValue, now
from recover.step import poisoned_sample
from recover.step.loop.clock import Clock
from recover.step.randomness import Randomness
from recover.world.world import World

CHECKED = 1 << 20  # bytes of a tensor that enter the checksum of its microbatch
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Stream(Protocol[T_co]):
    """Microbatches by number; as many as the run asks for."""

    def __getitem__(self, index: int, /) -> T_co: ...


def check_stream(stream: Any) -> None:
    """Raise TypeError for an object that has no microbatch i: any replica may be asked for any
    of them."""
    if (remedy := dataloader_remedy(stream)) is not None:
        raise TypeError(
            f"the stream is a DataLoader, which gives what it likes in an order of its own; {remedy}"
        )
    if isinstance(stream, IterableDataset) or not hasattr(stream, "__getitem__"):
        raise TypeError(
            f"the stream is a {type(stream).__name__}, and cannot be asked for microbatch i; make one of it: "
            "recover.stream(dataset, batch_size=...)"
        )


def dataloader_remedy(stream: Any) -> str | None:
    """The remedy for a DataLoader that is given as the stream; None if `stream` is not one."""
    if not isinstance(stream, DataLoader):
        return None
    by_batches = stream.batch_size is None and stream.batch_sampler is not None
    sampler = getattr(stream.batch_sampler, "sampler", stream.batch_sampler) if by_batches else stream.sampler
    given = {"batch_size": stream.batch_size or getattr(stream.batch_sampler, "batch_size", None) or 1}
    if isinstance(sampler, RandomSampler):
        given |= {"shuffle": True, "seed": 0}
    if stream.num_workers:
        given["workers"] = stream.num_workers
    words = ", ".join(f"{name}={value}" for name, value in given.items())
    collate = "" if stream.collate_fn is default_collate else ", collate_fn=loader.collate_fn"
    mend = f"write recover.stream(loader.dataset, {words}{collate})"
    if isinstance(stream.dataset, IterableDataset) or isinstance(sampler, RandomSampler | SequentialSampler):
        return mend
    return (
        f"{mend}; its {type(sampler).__name__} is not carried over: take a Subset of the dataset, or give Step a "
        "stream of your own, whose stream[i] is microbatch i"
    )


def _microbatch(stream: Stream[T], index: int) -> T:
    try:
        return stream[index]
    except LookupError as error:
        error.add_note(
            f"recover: the stream was asked for microbatch {index}; it must have as many as the loop takes steps of B, "
            "numbered from 0: end the loop before, or make one that goes round and round, by recover.stream(dataset)"
        )
        raise


def checksum(value: Any) -> int:
    """32 bits over the tensors in host memory of a microbatch: arrays, tensors, and lists, tuples
    and dicts of them. Only the first megabyte of each tensor counts, to limit the cost. Subclasses
    of tensors, and tensors on a device, count as 0."""
    total = 0
    if type(value) is torch.Tensor:
        if value.device.type in deferred.NEAR and value.layout is torch.strided and value.numel():
            first = value.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            total = zlib.crc32(first[:CHECKED].view(torch.uint8)[:CHECKED].numpy().data)
    elif isinstance(value, np.ndarray):
        total = zlib.crc32(value.ravel()[:CHECKED].tobytes()[:CHECKED])
    elif isinstance(value, Mapping):
        for key, each in value.items():
            total = zlib.crc32(f"{key}={checksum(each)};".encode(), total)
    elif isinstance(value, list | tuple):
        for each in value:
            total = zlib.crc32(f"{checksum(each)};".encode(), total)
    elif isinstance(value, int | float | str):
        total = zlib.crc32(repr(value).encode())
    return total


class MicrobatchesInFlight:
    """The microbatch in flight, or all of a round. `pending`: pairs of slot and sample whose backward
    is to come."""

    def __init__(self, world: World, samples: Any, randomness: Randomness, clock: Clock) -> None:
        self.pending: list[tuple[int, int]] = []
        self.checksums: list[int] = []  # of their contents
        self._world, self._samples, self._randomness = world, samples, randomness
        self._suspects: list[tuple[int, int]] = []  # blamed if this rank raises now
        self._ran: set[int] = set()  # slots run in this step, over all attempts
        self._under_way: list[tuple[int, int]] = []  # queued on a device that may not have run them yet
        self._step, self._clock = 0, clock

    def announce(self, stream: Any, slots: list[int]) -> None:
        """Announce the samples to come to a stream that reads ahead."""
        if expect := getattr(stream, "expect", None):
            expect(*self._samples.coming(slots))

    def read(self, stream: Stream[T], step: int, slots: list[int]) -> list[T]:
        """Read the samples of these slots, each with random draws of its own."""
        self._step, self.pending, self.checksums = step, [], []
        self._clock.start()
        batches = []
        for slot in slots:
            self._suspects = [(slot, self._samples.index(step, slot))]
            self._show(self._suspects)
            self._world.hooks.reading(slot)
            self._randomness.read(step, slot)
            batches.append(_microbatch(stream, self._suspects[0][1]))
            self.checksums.append(checksum(batches[-1]))
            self.pending += self._suspects
        if len(slots) > 1:
            self._show(self.pending)
        self._suspects = self.pending
        return batches

    def seed(self, number: int, stage: int) -> None:
        """Seed the generators for microbatch `number` of those in flight."""
        if self.pending:  # not in a rehearsal outside of any step
            self._randomness.compute(self._step, self.pending[number][0], stage)

    def seconds(self) -> float:
        """Seconds since they were handed out; waits for a device."""
        return now(self._clock.took())

    def computed(self) -> float | DeviceValue[float]:
        """Note that their backward is done, or queued on a device. Returns the seconds, which a device
        reports later.

        This is a sign of life for the watchdog, and progress if the slots run for the first time
        in this step.
        """
        world, took, slots = self._world, self._clock.took(), {slot for slot, _ in self.pending}
        if isinstance(took, DeviceValue):
            self._under_way += self.pending
            took = DeviceValue(partial(self._device_is_through, took, self.pending))
        world.board.touch(world.rank)
        self._show([])
        if slots - self._ran:
            world.board.accomplish(world.rank)
        self._ran |= slots
        self.pending, self._suspects = [], []
        return took

    def _device_is_through(self, took: DeviceValue[float], slots: list[tuple[int, int]]) -> float:
        seconds = took.value
        self._under_way = [each for each in self._under_way if each not in slots]
        self._show([])
        return seconds

    def _show(self, slots: list[tuple[int, int]]) -> None:
        """Show on the board what this rank or its device computes."""
        self._world.board.compute(self._world.rank, [*self._under_way, *slots])

    def leave(self) -> None:
        """Forget what is pending: the step is left on this rank. The suspects stay: if no code catches
        the exception, they are to blame for it."""
        self.pending = []

    def committed(self) -> None:
        self._ran.clear()
        self._under_way.clear()
        self._clock.forget()

    def blame(self, error: BaseException) -> None:
        """Write a note of the suspects: this rank is about to die of an exception."""
        suspects = self._suspects
        if isinstance(error, torch.AcceleratorError):
            # A device reports errors late: any microbatch that it may not have finished can be the
            # cause.
            suspects = [*self._under_way, *suspects]
        if suspects:
            poisoned_sample.leave_note(self._world.notes, self._step, suspects, error)
