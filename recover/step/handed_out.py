"""The microbatches that were handed out and wait for their backward: who is to blame, what is shown, what is drawn."""

from __future__ import annotations

import time
from typing import Any, Protocol, TypeVar

from recover.step import poison
from recover.step.randomness import Randomness
from recover.world.world import World

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Stream(Protocol[T_co]):
    """Microbatches by number, as many as anybody may ask for."""

    def __getitem__(self, index: int, /) -> T_co: ...


class HandedOut:
    """One microbatch, or all of a round. `pending`: slots and samples whose backward is to come."""

    def __init__(self, world: World, samples: Any, randomness: Randomness) -> None:
        self.pending: list[tuple[int, int]] = []
        self._world, self._samples, self._randomness = world, samples, randomness
        self._suspects: list[tuple[int, int]] = []  # those that are to blame if this rank raises now
        self._ran: set[int] = set()  # slots of the step under way, however often it was begun
        self._step, self._since = 0, 0.0

    def read(self, stream: Stream[T], step: int, slots: list[int]) -> list[T]:
        """The samples of these slots, each read with draws of its own."""
        self._step, self._since, self.pending = step, time.perf_counter(), []
        batches = []
        for slot in slots:
            self._suspects = [(slot, self._samples.index(step, slot))]
            self._world.board.compute(self._world.rank, self._suspects)
            self._world.hooks.reading(slot)
            self._randomness.read(step, slot)
            batches.append(stream[self._suspects[0][1]])
            self.pending += self._suspects
        self._suspects = self.pending
        self._world.board.compute(self._world.rank, self._suspects)
        return batches

    def seed(self, number: int, stage: int) -> None:
        """Draw from here on as microbatch `number` of these does."""
        if self.pending:  # a rehearsal outside of any step draws as it likes
            self._randomness.compute(self._step, self.pending[number][0], stage)

    @property
    def seconds(self) -> float:
        """Since they were handed out."""
        return time.perf_counter() - self._since

    def computed(self) -> None:
        """Their backward is through. Told to the watchers, and, the first time in this step, to the launcher."""
        world, slots = self._world, {slot for slot, _ in self.pending}
        world.board.touch(world.rank)
        world.board.compute(world.rank, ())
        if slots - self._ran:
            world.board.accomplish(world.rank)
        self._ran |= slots
        self.pending, self._suspects = [], []

    def leave(self) -> None:
        """The step is given up here; but if nobody catches the exception, the suspects are to blame for it."""
        self.pending = []

    def committed(self) -> None:
        self._ran.clear()

    def blame(self, error: BaseException) -> None:
        """This rank is about to die of an exception."""
        if self._suspects:
            poison.leave_note(self._world.notes, self._step, self._suspects, error)
