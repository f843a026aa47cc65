"""A joining rank takes the state that it is given, in one pause or in instalments, and applies the
updates of the steps in between to what it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from recover.gradients.buckets import Bucket
from recover.gradients.optimizers import groups_of
from recover.gradients.replica_interface import replica_of
from recover.step.joining.giver import StripesOf
from recover.step.joining.instalments import StateEntries, TrainedState
from recover.step.joining.joining_rank import REST
from recover.step.joining.numbers import from_bits, to_bits
from recover.step.joining.parcel import OtherStateError, Parcel
from recover.world.commands import Command
from recover.world.world import World

# Receives the state from these ranks, without the entries of these numbers. Returns the number of bytes; None
# if the state did not arrive.
TakeState = Callable[[tuple[int, ...], frozenset[int]], int | None]


class StateReceiver:
    """The side of a joining rank: a `Receiver` of `recover.step.joining.joining_rank`."""

    def __init__(
        self,
        world: World,
        state: TrainedState,
        stripes: StripesOf,
        take_state: TakeState,
    ) -> None:
        self._world, self._state, self._stripes, self._take_state = world, state, stripes, take_state
        self._held: set[int] = set()
        self._applied: int | None = None  # the step whose update the entries have
        self._summed: int | None = None  # the step whose sums the buckets hold
        self.ready = False
        self.took_rest = False  # all of the state has come in instalments

    @property
    def holds(self) -> str:
        return to_bits(self._held)

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._state.gradients.buckets

    def take_state(self, command: Command) -> int | None:
        self.took_rest = command["do"] == REST
        if not self.took_rest:
            return self._take_state(self._world.members, frozenset())
        if not self._take_entries(command):
            return None
        return self._take_state((self._world.coordinator,), from_bits(command["held"]))

    def take_update(self, command: Command) -> bool:
        return self._take_entries(command)

    def take_instalment(self, command: Command) -> bool:
        if "refused" in command:
            raise OtherStateError(f"this replica cannot join: {command['refused']}")
        if "kinds" in command:
            Parcel(self._state.model, self._state.optimizer, None, {}).compare(command["kinds"])
        if not self._take_entries(command):
            return False
        self._follow_trained(command["trained"])
        self._summed, self.ready = command["step"], command["ready"]
        return True

    def _take_entries(self, command: Command) -> bool:
        """Apply the last update to what this rank holds, and take the entries that come with the
        command. Returns whether they have arrived."""
        update, numbers = command["committed"], {entry["number"] for entry in command["entries"]}
        entries = self._state.entries()
        opened = entries.open(command["entries"], update.get("settings"))
        # Entries that arrive include this update, and are received into their places.
        self._held -= numbers
        stripes = self._stripes((self._world.coordinator,), self._world.takers, opened.parts)
        if not stripes.take(opened.parts):
            return False
        self._catch_up(update, opened.settings(), entries)
        opened.install()
        self._held |= numbers
        return True

    def _catch_up(self, update: dict[str, Any], settings: Any, entries: StateEntries) -> None:
        """Apply the update of the last committed step, unless this rank has it, or holds nothing yet."""
        step = update["step"]
        if self._applied not in (None, step):
            if self._summed != step:
                raise OtherStateError(
                    f"this replica cannot join: it has the sums of step {self._summed}, and the members have "
                    f"committed step {step} since step {self._applied}; it is started again"
                )
            if "weight" in update:
                self._apply(update, settings, entries)
        self._applied = step

    def _apply(self, update: dict[str, Any], settings: Any, entries: StateEntries) -> None:
        gradients = self._state.gradients
        for group, theirs in zip(groups_of(self._state.optimizer), settings, strict=True):
            group.update(theirs)
        if gradients.sum.exponents is not None:
            gradients.sum.exponents.adopt(update["exponents"])
        held, used = entries.parameters(self._held), from_bits(update["used"])
        gradients.install(
            update["weight"],
            update["factors"],
            [number in used and each in held for number, each in enumerate(gradients.parameters)],
        )
        replica_of(self._state.model).reshard()
        self._world.hooks("update")
        self._state.apply(update["step"])
        gradients.release()
        self._world.hooks("after-update")

    def _follow_trained(self, trained: Sequence[bool]) -> None:
        """Freeze or unfreeze parameters as the members have."""
        parameters = list(self._state.model.parameters())
        for parameter, is_trained in zip(parameters, trained, strict=True):
            parameter.requires_grad_(is_trained)
        if [id(each) for each in parameters if each.requires_grad] != list(
            map(id, self._state.gradients.parameters)
        ):
            self._state.gradients.lay_out(parameters)
