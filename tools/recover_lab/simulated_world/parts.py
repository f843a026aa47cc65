"""The parts of a simulated world, whose ranks are tasks of one process; the production code runs on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

from recover.world.carriers.worker import Work, Worker
from recover.world.hooks import NoHooks
from recover.world.interfaces import Looks, WorldParts
from recover.world.rank_exit import End
from recover.world.slot_notes import Note
from recover_lab.simulated_world.carriers import SimulatedCarriers
from recover_lab.simulated_world.scheduler import Died, SimulatedFabric, Simulation


class InlineWorker(Worker):
    """A worker without a thread: a task runs at once, in the caller."""

    def __init__(self) -> None:
        self._failed: list[Work] = []
        self._running = False
        self._ended = 0

    def post(self, task: Callable[[], object], is_ready: Callable[[], bool] = lambda: True) -> Work:
        work = Work(task)
        self._running = True
        try:
            if (rest := work.run()) is not None:
                work.finish(rest)
        finally:
            self._running = False
            self._ended += 1
        if work.error is not None:
            self._failed.append(work)
        return work

    def drain(self) -> None:
        pass

    @property
    def busy(self) -> bool:
        return self._running

    @property
    def ended(self) -> int:
        return self._ended

    @property
    def is_at_wire(self) -> bool:
        return self._running


class SimulatedOwn:
    """The process of a virtual rank."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self._simulation, self._rank = simulation, rank
        self._callbacks: list[Callable[[], object]] = []

    def log(self, text: str) -> None:
        pass

    def die(
        self, how: End | str, text: str, detail: str | None = None, more: Mapping[str, object] | None = None
    ) -> NoReturn:
        if str(how) in (End.EXCLUDED, End.LEFT) and self._simulation.reluctant:
            self._simulation.leaving.add(self._rank)
            while (
                self._simulation.staying
            ):  # stuck while exiting: the others must not continue before it is dead
                self._simulation.fabrics[self._rank].pause(1.0)
        self._simulation.kill(self._rank, str(how))
        raise Died

    def leave(self, detail: str) -> NoReturn:
        self.die(End.LEFT, detail)

    def record(self, how: End | str, detail: str = "", rank: int | None = None) -> None:
        pass

    def on_success(self, callback: Callable[[], object]) -> None:
        self._callbacks.append(callback)

    def on_raise(self, callback: Callable[[BaseException], object]) -> None:
        pass

    def in_step(self, inside: bool) -> None:
        pass

    def succeed(self) -> None:
        """The end of a real rank whose script has ended with success."""
        while self._callbacks:
            self._callbacks.pop()()


class SimulatedNotes:
    """Notes that all ranks read in the run directory."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self._all: dict[tuple[int, int], Note] = simulation.reductions.setdefault("notes", {})
        self._rank = rank

    def leave(
        self, step: int, suspects: Sequence[tuple[int, int]], why: str, rank: int | None = None
    ) -> None:
        rank = self._rank if rank is None else rank
        self._all[step, rank] = Note(rank, tuple(suspects), why)

    def read(self, step: int) -> Iterator[Note]:
        yield from [note for (of_step, _), note in sorted(self._all.items()) if of_step == step]


def simulated_parts(simulation: Simulation, fabric: SimulatedFabric) -> WorldParts:
    worker = InlineWorker()

    def watch(watcher: Looks) -> None:
        simulation.watchers[fabric.rank] = watcher.look

    return WorldParts(
        fabric=fabric,
        liveness=simulation.board,
        hooks=NoHooks(),
        worker=worker,
        carriers=SimulatedCarriers(simulation, fabric, worker),
        own=SimulatedOwn(simulation, fabric.rank),
        notes=SimulatedNotes(simulation, fabric.rank),
        watch=watch,
    )
