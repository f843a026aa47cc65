"""The state of a run in instalments: whole parameters and static buffers, each with its optimizer
state, a few with every attempt.

These entries change only in updates, so they may travel while the step is computed. A joining rank
applies the update to the entries that it holds. An entry that changes outside of the update (its
version counter shows this) does not count as handed over: it is sent with the rest of the state.
Nor do buffers and frozen parameters that change in an update, by hooks of the optimizer: these may
follow from state that a joining rank does not have, such as running buffers, and votes do not
compare such buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recover.gradients.module_gradients import Gradients
from recover.gradients.optimizers import groups_of, optimizers_of, parameters_of
from recover.gradients.parts import local_part
from recover.gradients.state_hash import leaves
from recover.step.joining.packing import pack, unpack
from recover.step.joining.tensor_places import Place, TensorPlaces, as_bytes, row_for
from recover.world.carriers.worker import Completion, Worker

# Limit of an instalment's time on the wire: seconds, or a share of a step, whichever is longer.
SECONDS, SHARE = 0.015, 0.025
FIRST_RATE = 200e6  # bytes per second, until one was measured
STEPS = 100  # most instalments of one state, if its entries are small enough
LARGE = 4  # an entry of more than this many times the limit of an instalment is mentioned in the log


@dataclass(frozen=True)
class TrainedState:
    """The state that updates change, on members and on joining ranks.

    gradients:  with the sums of the step
    running:    names of buffers that every step changes
    apply:      calls the optimizers, with the seeds of the step of this number
    """

    model: torch.nn.Module
    optimizer: Any
    gradients: Gradients
    running: Callable[[], Collection[str]]
    apply: Callable[[int], None]

    def entries(self) -> StateEntries:
        return StateEntries(self.model, self.optimizer, self.running())


class StateEntries:
    """Parameters and static buffers of a model, by the numbers that `Parcel` gives them. `running`:
    names of buffers that every step changes, which are no entries."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, running: Collection[str]) -> None:
        named = [*model.named_parameters(), *model.named_buffers()]
        self._tensors = [tensor for _, tensor in named]
        self._names = [name for name, _ in named]
        self._running = {number for number, name in enumerate(self._names) if name in running}
        # Refers to their state, not to the optimizers: if a join changed the number of references to an
        # optimizer, `Joinable` would search for schedulers again, and all members would wait for it.
        self._states = {
            parameter: each.state for each in optimizers_of(optimizer) for parameter in parameters_of(each)
        }
        self._group_sizes = [len(group["params"]) for group in groups_of(optimizer)]
        self._places = TensorPlaces(self._tensors)

    def numbers(self) -> list[int]:
        """All entries, in the order in which they are handed over: those that no update changes first."""
        every = [number for number in range(len(self._tensors)) if number not in self._running]
        return sorted(every, key=lambda number: self._tensors[number].requires_grad)

    def untrained(self) -> list[int]:
        """Entries that the optimizers do not change: static buffers and frozen parameters."""
        return [number for number in self.numbers() if not self._tensors[number].requires_grad]

    @property
    def form(self) -> tuple[list[str], list[int]]:
        """The meaning of the numbers of entries, and of the groups of the optimizers."""
        return self._names, self._group_sizes

    def name(self, number: int) -> str:
        return self._names[number]

    def parameters(self, numbers: Collection[int]) -> set[torch.Tensor]:
        return {self._tensors[number] for number in numbers}

    def size(self, number: int) -> int:
        """Bytes of an entry."""
        state = (value for _, value in leaves(self._state(number)) if isinstance(value, torch.Tensor))
        return sum(local_part(each).nbytes for each in (self._tensors[number], *state))

    def marks(self, number: int) -> list[tuple[Any, int]]:
        """The tensors of an entry with their version counters, which tell whether it was changed. The
        tensors are kept, so that no new one gets the address of an old one."""
        values = [self._tensors[number], *(value for _, value in leaves(self._state(number)))]
        return [
            (local_part(each), _version(local_part(each))) if isinstance(each, torch.Tensor) else (each, 0)
            for each in values
        ]

    def pack(self, numbers: Sequence[int], found: list[torch.Tensor]) -> list[dict[str, Any]]:
        """The entries as JSON; their tensors are appended to `found`."""

        def keep(name: str, tensor: torch.Tensor) -> Place:
            return self._places.take_out(name, tensor, found)

        packed = []
        for number in numbers:
            name, state = self._names[number], self._state(number)
            found.append(local_part(self._tensors[number].detach()))
            entry = {"number": number, "at": len(found) - 1}
            if state is not None:
                entry["state"] = pack(state, f"optimizer state of {name}", keep)
            packed.append(entry)
        return packed

    def open(self, packed: Sequence[dict[str, Any]], more: Any = None) -> OpenedEntries:
        """Room for entries that are about to arrive; `more`: further JSON with places of tensors."""
        return OpenedEntries(self._places, packed, self._tensors, more, self._install)

    def _state(self, number: int) -> Any:
        """The optimizer state of a parameter; None if there is none."""
        tensor = self._tensors[number]
        states = self._states.get(tensor)  # type: ignore[call-overload]
        return states[tensor] if states is not None and tensor in states else None

    def _install(self, number: int, state: Any) -> None:
        tensor = self._tensors[number]
        states = self._states.get(tensor)  # type: ignore[call-overload]
        if states is not None:
            states.pop(tensor, None)
            if state is not None:
                states[tensor] = state


class OpenedEntries:
    """Entries that are about to arrive: `parts` are to be filled, `install` puts them in place."""

    def __init__(
        self,
        places: TensorPlaces,
        packed: Sequence[dict[str, Any]],
        tensors: Sequence[torch.Tensor],
        more: Any,
        install: Callable[[int, Any], None],
    ) -> None:
        self._places, self._packed, self._more, self._install = places, packed, more, install
        self._targets = {each["at"]: local_part(tensors[each["number"]].detach()) for each in packed}
        rooms = {at: row_for(target) for at, target in self._targets.items()}

        def make_room(place: Place) -> torch.Tensor:
            return rooms.setdefault(place["number"], places.room_for(place))

        unpack([each.get("state") for each in packed], make_room)
        unpack(more, make_room)
        self._rooms = [rooms[at] for at in sorted(rooms)]
        self.parts = [as_bytes(room) for room in self._rooms]

    def settings(self) -> Any:
        """`more`, once its tensors have arrived."""
        return unpack(self._more, self._put_back)

    @torch.no_grad()
    def install(self) -> None:
        """Put all entries that have arrived in their places."""
        for at, target in self._targets.items():
            if self._rooms[at] is not target:
                target.copy_(self._rooms[at])
        for each in self._packed:
            state = unpack(each["state"], self._put_back) if "state" in each else None
            self._install(each["number"], state)

    def _put_back(self, place: Place) -> torch.Tensor:
        return self._places.put_back(place, self._rooms)


class ChangeWatch:
    """Entries that have changed outside of the update since a join began: the same on all members."""

    def __init__(self) -> None:
        self.changed: set[int] = set()
        self.has_other_form = False  # the user has added parameters, or removed some: numbers are others now
        self._form: tuple[list[str], list[int]] = [], []
        self._marks: dict[int, list[tuple[Any, int]]] = {}

    def begin(self, entries: StateEntries) -> None:
        """Begin to watch: a join begins."""
        self.changed, self.has_other_form, self._form = set(), False, entries.form
        self._note(entries)

    def look(self, entries: StateEntries) -> None:
        """Compare with the last update."""
        self._compare(entries, entries.numbers())

    def updated(self, entries: StateEntries) -> None:
        """An update has changed the entries that are trained."""
        self._compare(entries, entries.untrained())
        self._note(entries)

    def end(self) -> None:
        """Stop watching, as no replica is joining: tensors that the user replaces are freed again."""
        self._marks = {}

    def _compare(self, entries: StateEntries, numbers: Iterable[int]) -> None:
        self.has_other_form |= entries.form != self._form
        for number in () if self.has_other_form else numbers:
            if number not in self.changed and not _same(self._marks[number], entries.marks(number)):
                self.changed.add(number)

    def _note(self, entries: StateEntries) -> None:
        self._marks = {number: entries.marks(number) for number in entries.numbers()}


class InstalmentSize:
    """Limits the size of an instalment, from the rate at which earlier ones were sent."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._rate, self._step = worker, FIRST_RATE, 0.0
        self._last = time.perf_counter()

    def step_ended(self) -> None:
        now = time.perf_counter()
        self._step, self._last = now - self._last, now

    def limit(self, total: int) -> int:
        """Bytes of the next instalment, out of `total` of the whole state."""
        return max(int(self._rate * max(SECONDS, SHARE * self._step)), -(-total // STEPS))

    def timed(self, nbytes: int, send: Callable[[], object], is_whole: Callable[[], bool]) -> None:
        """Call `send`, which posts operations, and measure how long these take. `is_whole`: whether none of
        them has failed; failing takes no time, and tells nothing of the rate."""
        began = 0.0

        def begin() -> None:
            nonlocal began
            began = time.perf_counter()

        def end() -> None:
            if is_whole():
                self._rate = nbytes / max(time.perf_counter() - began, 1e-6)

        self._worker.post(begin)
        send()
        # Posted as a completion: on a device it is reached only after the operations.
        self._worker.post(lambda: Completion(end))


def choose(entries: StateEntries, left: Sequence[int], limit: int) -> Iterator[int]:
    """The first of the entries `left` that fit into `limit` bytes together; at least one."""
    nbytes = 0
    for count, number in enumerate(left):
        nbytes += entries.size(number)
        if count and nbytes > limit:
            return
        yield number


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _same(these: Sequence[tuple[Any, int]], those: Sequence[tuple[Any, int]]) -> bool:
    return (
        len(these) == len(those)
        and all(
            a is b if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) else a == b
            for (a, _), (b, _) in zip(these, those, strict=True)
        )
        and all(a == b for (_, a), (_, b) in zip(these, those, strict=True))
    )
