"""Members hand over the state in instalments: with every attempt, the coordinator of a group gives its
joining ranks a few entries, and sends them the update that was committed last.

Every member keeps what it needs to become the coordinator after a death: the last update, and which
entries have changed outside of updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recover.gradients.optimizers import groups_of
from recover.step.joining.instalments import (
    LARGE,
    ChangeWatch,
    InstalmentSize,
    StateEntries,
    TrainedState,
    choose,
)
from recover.step.joining.joining_rank import UPDATE
from recover.step.joining.numbers import from_bits, to_bits
from recover.step.joining.packing import NotPackableError, pack
from recover.step.joining.parcel import Parcel
from recover.step.joining.stripes import Stripes
from recover.step.joining.tensor_places import TensorPlaces, as_bytes
from recover.step.record import arrivals_of
from recover.world import rank_exit
from recover.world.commands import Command
from recover.world.world import World

StripesOf = Callable[[tuple[int, ...], tuple[int, ...], list[torch.Tensor]], Stripes]


class InstalmentGiver:
    """The side of the members.

    stripes:   makes a transfer from givers to takers
    obstacle:  names state that a joining replica would not receive
    """

    def __init__(
        self, world: World, state: TrainedState, stripes: StripesOf, obstacle: Callable[[], str | None]
    ) -> None:
        self._world, self._state, self._stripes, self._obstacle = world, state, stripes, obstacle
        self._size = InstalmentSize(world.worker)
        self._watch = ChangeWatch()
        self._given: set[int] = set()  # entries that the joining ranks of this group hold
        self._epoch = 0  # in which they were given
        self._update: dict[str, Any] = {}  # the last committed one
        self._settings: list[torch.Tensor] = []  # tensors among its settings of the optimizers
        self._refused = ""  # what cannot be sent any more, since this join has begun
        self.sent = 0  # bytes in this join, of this shard
        self.total = 0  # bytes of all entries

    @property
    def held(self) -> frozenset[int]:
        """Entries that all joining ranks of this group hold, as the members hold them."""
        if self._epoch != self._world.epoch:
            self._epoch = self._world.epoch
            takers = arrivals_of(self._world.last_census.records)
            holds = [from_bits(takers[rank].holds) for rank in self._world.takers]
            self._given = set(frozenset.intersection(*holds)) if holds else set()
        # If parameters were added, joining ranks count as holding nothing: with the first entries they
        # receive the form of the state, which differs from theirs, and end.
        return frozenset() if self._watch.has_other_form else frozenset(self._given - self._watch.changed)

    @property
    def progress(self) -> float:
        """The share of the state that the joining ranks of this group hold, as their coordinator knows it."""
        entries = self._state.entries()
        return sum(map(entries.size, self.held)) / self.total if self.total else 0.0

    def begin(self, step: int) -> None:
        """Begin a join: replicas were admitted before this step."""
        entries = self._state.entries()
        self._watch.begin(entries)
        self.skipped(step - 1)
        self._refused = ""
        self.sent, self.total = 0, sum(map(entries.size, entries.numbers()))

    def before_update(self, step: int, weight: float, factors: Sequence[float], used: Sequence[bool]) -> None:
        """Keep the update of this step, and send it to joining ranks. Called just before the optimizers."""
        if not self._world.arrivals:
            self._watch.end()
            return
        self._watch.look(self._state.entries())
        exponents = self._state.gradients.sum.exponents
        self._settings = []
        places = TensorPlaces(list(self._state.model.parameters()))
        try:
            # Copies of their tensors: the optimizer may change them.
            settings = pack(
                [
                    {name: value for name, value in group.items() if name != "params"}
                    for group in groups_of(self._state.optimizer)
                ],
                "optimizer",
                lambda name, tensor: places.take_out(name, tensor.clone(), self._settings),
            )
        except NotPackableError as error:
            self.skipped(step)
            self._refused = str(error)
            return
        self._update = {
            "step": step,
            "weight": weight,
            "factors": list(factors),
            "used": to_bits(number for number, is_used in enumerate(used) if is_used),
            "exponents": None if exponents is None else exponents.current.tolist(),
            "settings": settings,
        }
        if self._world.rank == self._world.coordinator:
            # Sent now, so that joining ranks apply it while the members do. The next command repeats it.
            self._send({"do": UPDATE}, self._state.entries(), [])

    def after_update(self) -> None:
        if self._world.arrivals:
            self._watch.updated(self._state.entries())
            self._size.step_ended()

    def skipped(self, step: int) -> None:
        """Note that the step was committed without an update."""
        self._update, self._settings = {"step": step}, []

    def give(self, command: Command) -> None:
        """Tell the joining ranks of this group to take part in an attempt, and send an instalment.
        Called on their coordinator. Errors show at the vote."""
        entries = self._state.entries()
        self._watch.look(entries)
        held = self.held
        left = [n for n in entries.numbers() if n not in held and n not in self._watch.changed]
        limit = self._size.limit(self.total)
        numbers = list(choose(entries, left, limit))
        if numbers and (nbytes := entries.size(numbers[0])) > LARGE * limit:
            rank_exit.log(
                f"{entries.name(numbers[0])} and its optimizer state are handed to a joining replica in one piece of "
                f"{nbytes} bytes: the step waits for it"
            )
        form: Command = {}
        if not held:
            form = {"kinds": Parcel(self._state.model, self._state.optimizer, None, {}).kinds}
            self._refused = self._refused or self._obstacle() or ""
        trained = [parameter.requires_grad for parameter in self._state.model.parameters()]
        more = {"trained": trained, "ready": len(numbers) == len(left)}
        try:
            if not self._refused:
                self._send(command | form | more, entries, numbers)
                self._given.update(numbers)
        except NotPackableError as error:  # state that an optimizer has since the join began
            self._refused = str(error)
        if self._refused:
            self._send(command | {"refused": self._refused}, entries, [])

    def give_rest(self, command: Command) -> bool:
        """Tell the joining ranks to take the rest of the state, which follows: all but `held`. Returns
        whether this rank is the one that gives it."""
        entries = self._state.entries()
        self._watch.look(entries)
        if self._world.rank != self._world.coordinator:
            return False
        self._send(command | {"held": to_bits(self.held)}, entries, [])
        return True

    def _send(self, command: Command, entries: StateEntries, numbers: Sequence[int]) -> None:
        """Send a command with the last update and with these entries."""
        found = list(self._settings)
        packed = entries.pack(numbers, found)
        parts = [as_bytes(tensor.contiguous()) for tensor in found]
        self._world.tell(command | {"committed": self._update, "entries": packed})
        self._world.hooks("instalment")
        stripes = self._stripes((self._world.rank,), self._world.takers, parts)
        nbytes = sum(map(len, parts))
        if numbers:
            cross = self._world.cross
            self._size.timed(nbytes, lambda: stripes.give(parts, wait=False), lambda: cross.error is None)
            self.sent += nbytes
        else:
            stripes.give(parts, wait=False)
