"""The microbatches that were handed out and wait for their backward: who is to blame, what is shown, what is drawn."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from recover.gradients.deferred import DeviceValue, now
from recover.step import poisoned_sample
from recover.step.loop.clock import Clock
from recover.step.randomness import Randomness
from recover.world.world import World

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Stream(Protocol[T_co]):
    """Microbatches by number, as many as anybody may ask for."""

    def __getitem__(self, index: int, /) -> T_co: ...


def check_stream(stream: Any) -> None:
    """A stream is asked for microbatch i, whichever replica it falls to. What has an order of its own cannot be."""
    if (mend := loader_mend(stream)) is not None:
        raise TypeError(
            f"the stream is a DataLoader, which gives what it likes in an order of its own; {mend}"
        )
    if isinstance(stream, IterableDataset) or not hasattr(stream, "__getitem__"):
        raise TypeError(
            f"the stream is a {type(stream).__name__}, and cannot be asked for microbatch i; make one of it: "
            "recover.stream(dataset, batch_size=...)"
        )


def loader_mend(stream: Any) -> str | None:
    """What to write instead of a DataLoader; None if it is none."""
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


class MicrobatchesInFlight:
    """One microbatch, or all of a round. `pending`: slots and samples whose backward is to come."""

    def __init__(self, world: World, samples: Any, randomness: Randomness, clock: Clock) -> None:
        self.pending: list[tuple[int, int]] = []
        self._world, self._samples, self._randomness = world, samples, randomness
        self._suspects: list[tuple[int, int]] = []  # those that are to blame if this rank raises now
        self._ran: set[int] = set()  # slots of the step under way, however often it was begun
        self._under_way: list[tuple[int, int]] = []  # told to a device that may not be through with them
        self._step, self._clock = 0, clock

    def announce(self, stream: Any, slots: list[int]) -> None:
        """Tell a stream that can read ahead what will be asked for."""
        if expect := getattr(stream, "expect", None):
            expect(*self._samples.coming(slots))

    def read(self, stream: Stream[T], step: int, slots: list[int]) -> list[T]:
        """The samples of these slots, each read with draws of its own."""
        self._step, self.pending = step, []
        self._clock.start()
        batches = []
        for slot in slots:
            self._suspects = [(slot, self._samples.index(step, slot))]
            self._show(self._suspects)
            self._world.hooks.reading(slot)
            self._randomness.read(step, slot)
            batches.append(_microbatch(stream, self._suspects[0][1]))
            self.pending += self._suspects
        if len(slots) > 1:
            self._show(self.pending)
        self._suspects = self.pending
        return batches

    def seed(self, number: int, stage: int) -> None:
        """Draw from here on as microbatch `number` of these does."""
        if self.pending:  # a rehearsal outside of any step draws as it likes
            self._randomness.compute(self._step, self.pending[number][0], stage)

    def seconds(self) -> float:
        """Since they were handed out; on a device it is waited for."""
        return now(self._clock.took())

    def computed(self) -> float | DeviceValue[float]:
        """Their backward is through, and took so many seconds; or it was told to a device, which says that later.

        Told to the watchers, and, the first time in this step, to the launcher.
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
        """What this rank, or its device, is busy with."""
        self._world.board.compute(self._world.rank, [*self._under_way, *slots])

    def leave(self) -> None:
        """The step is given up here; but if nobody catches the exception, the suspects are to blame for it."""
        self.pending = []

    def committed(self) -> None:
        self._ran.clear()
        self._under_way.clear()
        self._clock.forget()

    def blame(self, error: BaseException) -> None:
        """This rank is about to die of an exception."""
        suspects = self._suspects
        if isinstance(error, torch.AcceleratorError):
            # A device tells of it late: it may be of any microbatch that it is not known to be through with.
            suspects = [*self._under_way, *suspects]
        if suspects:
            poisoned_sample.leave_note(self._world.notes, self._step, suspects, error)
