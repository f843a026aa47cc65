"""The state of one rank for a hand-over: the bytes of its tensors, and a head of JSON that
describes everything else.

A rank sends its own part to the rank with the same shard in a joining replica, so nothing is
gathered: of a sharded tensor, the local part is sent. Everything else (numbers, settings, extras
of the user) is JSON, with a reference for each tensor: an optimizer that has not run yet has no
tensors, and creates those of the sender. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch

from recover.gradients.optimizers import optimizers_of
from recover.gradients.parts import local_part
from recover.step.joining.extra import Extra, restore, state_of
from recover.step.joining.packing import NotPackableError, pack, unpack
from recover.step.joining.tensor_places import Place, TensorPlaces, as_bytes, row_for


class OtherStateError(ValueError):
    """This process was started to join members whose state has another form, or that admit no
    replica."""


def refusal(why: str) -> bytes:
    """The head that is sent to a replica that must not join."""
    return json.dumps({"refused": why}).encode()


class Parcel:
    """The state of a rank that sends or receives it. `parts`: the bytes of its tensors.

    held:  numbers of parameters and buffers (parameters first, as the model names them) that the receiver holds
           already, with the optimizer state of these parameters: they are left out
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        scheduler: Any,
        extra: Mapping[str, Extra],
        held: Collection[int] = (),
    ) -> None:
        self._model, self._optimizer, self._scheduler, self._extra = model, optimizer, scheduler, extra
        self._named = [*model.named_parameters(), *model.named_buffers()]
        self._places = TensorPlaces([tensor for _, tensor in self._named])
        self._tensors = [local_part(tensor.detach()) for _, tensor in self._named]
        self._sent = [tensor for number, tensor in enumerate(self._tensors) if number not in held]
        self._held = {self._named[number][1] for number in held}
        # Tensors that are not contiguous, with a contiguous copy.
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rest: dict[str, Any] = {}

    def pack(self, position: Mapping[str, Any]) -> tuple[bytes, list[torch.Tensor]]:
        """The head, which describes the parts, and the parts. `position`: the position of the run.

        Raises NotPackableError with the name of an entry that cannot be sent.
        """
        found: list[torch.Tensor] = []
        rest = self._packed({"position": dict(position)}, found)
        head = {
            "kinds": self.kinds,
            "trained": [p.requires_grad for p in self._model.parameters()],
            "training": {name: module.training for name, module in self._model.named_modules()},
            "rest": rest,
        }
        parts = [as_bytes(tensor.contiguous()) for tensor in (*self._sent, *found)]
        return json.dumps(head).encode(), parts

    def obstacle(self) -> str | None:
        """The entry that cannot be sent to a joining replica, and why; None if there is none."""
        try:
            self._packed({}, [])
        except NotPackableError as error:
            return str(error)
        return None

    def open(self, head: bytes) -> list[torch.Tensor]:
        """Read the head. Returns local parts of the shapes that it describes, to be filled. Raises
        OtherStateError if the state of the members has another form."""
        found = json.loads(head)
        if "refused" in found:
            raise OtherStateError(f"this replica cannot join: {found['refused']}")
        self.compare(found["kinds"])
        self._rest = found["rest"]
        for parameter, is_trained in zip(self._model.parameters(), found["trained"], strict=True):
            parameter.requires_grad_(is_trained)
        for name, module in self._model.named_modules():
            module.training = found["training"].get(name, module.training)
        room: dict[int, torch.Tensor] = {}

        def make_room(place: Place) -> torch.Tensor:
            return room.setdefault(place["number"], self._places.room_for(place))

        unpack(self._rest, make_room)
        self._found = [room[number] for number in sorted(room)]
        rows = list(map(row_for, self._sent))
        self._late = [(mine, row) for mine, row in zip(self._sent, rows, strict=True) if mine is not row]
        return [as_bytes(tensor) for tensor in (*rows, *self._found)]

    @property
    def position(self) -> dict[str, Any]:
        """The position of the run, after `open`; tensors in it are filled with the parts."""
        position: dict[str, Any] = unpack(self._rest["position"], self._put_back)
        return position

    def install(self) -> dict[str, Any]:
        """Install the state after all parts are filled. Returns the position."""
        for mine, row in self._late:
            mine.copy_(row)
        rest = unpack(self._rest, self._put_back)
        for name, module in self._with_extra_state().items():
            module.set_extra_state(rest["modules"][name])
        for optimizer, state in zip(optimizers_of(self._optimizer), rest["optimizers"], strict=True):
            _fill_optimizer(optimizer, state, self._held)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(rest["scheduler"])
        for name, each in self._extra.items():
            restore(each, rest["extra"][name])
        position: dict[str, Any] = rest["position"]
        return position

    def _packed(self, more: Mapping[str, Any], found: list[torch.Tensor]) -> dict[str, Any]:
        """All state but parameters and buffers, under names that an error shows to the user."""

        def keep(name: str, tensor: torch.Tensor) -> Place:
            return self._places.take_out(name, tensor, found)

        modules, scheduler = self._with_extra_state(), self._scheduler
        packed = {
            "modules": {
                name: pack(module.get_extra_state(), f"the extra state of module {name!r}", keep)
                for name, module in modules.items()
            },
            "optimizers": [
                pack(self._without_held(each), f"optimizer {number}" if number else "optimizer", keep)
                for number, each in enumerate(optimizers_of(self._optimizer))
            ],
            "scheduler": None if scheduler is None else pack(scheduler.state_dict(), "scheduler", keep),
            "extra": {
                name: pack(state_of(each), f"extra[{name!r}]", keep) for name, each in self._extra.items()
            },
        }
        return packed | {name: pack(value, name, keep) for name, value in more.items()}

    def _without_held(self, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer, without the parameters that the receiver holds."""
        state: dict[str, Any] = optimizer.state_dict()
        if not self._held:
            return state
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        held = {number for number, each in zip(numbers, parameters, strict=True) if each in self._held}
        return state | {"state": {key: each for key, each in state["state"].items() if key not in held}}

    def _with_extra_state(self) -> dict[str, torch.nn.Module]:
        """Modules with state other than parameters and buffers."""
        plain = torch.nn.Module.get_extra_state
        return {
            name: module
            for name, module in self._model.named_modules()
            if type(module).get_extra_state is not plain
        }

    @property
    def kinds(self) -> dict[str, Any]:
        """Values that must be equal on both sides, under names for the error message."""
        groups = [
            [len(group["params"]) for group in each.param_groups] for each in optimizers_of(self._optimizer)
        ]
        return {
            "parameters and buffers (name, type, shape here)": [
                (name, str(tensor.dtype), tuple(tensor.shape))
                for (name, _), tensor in zip(self._named, self._tensors, strict=True)
            ],
            "parameters in each group of the optimizer": groups if len(groups) > 1 else groups[0],
            "kind of scheduler": type(self._scheduler).__name__,
            "modules with extra state": sorted(self._with_extra_state()),
            "names in extra=": sorted(self._extra),
        }

    def compare(self, theirs: Mapping[str, Any]) -> None:
        """Raise OtherStateError if the state of the members, of these kinds, has another form."""
        for what, here in json.loads(json.dumps(self.kinds)).items():
            if theirs[what] == here:
                continue
            if isinstance(here, list) and len(here) == len(theirs[what]):
                here, there = next(
                    pair for pair in zip(here, theirs[what], strict=True) if pair[0] != pair[1]
                )
            else:
                there = theirs[what]
            raise OtherStateError(
                f"this replica cannot join: {what} are {_short(here)} here, and {_short(there)} with the others; start "
                "it with the script and the settings that they run"
            )

    def _put_back(self, place: Place) -> torch.Tensor:
        return self._places.put_back(place, self._found)


def _fill_optimizer(optimizer: Any, state: Mapping[str, Any], held: Collection[torch.Tensor]) -> None:
    """Like `load_state_dict`, but without its cast to the type of the parameter. The state of
    parameters in `held` stays."""
    mine: dict[Any, Any] = {}
    for group, theirs in zip(optimizer.param_groups, state["param_groups"], strict=True):
        mine |= dict(zip(theirs["params"], group["params"], strict=True))
        group.update({name: value for name, value in theirs.items() if name != "params"})
    kept = {parameter: each for parameter, each in optimizer.state.items() if parameter in held}
    optimizer.state.clear()
    optimizer.state.update(kept)
    for key, value in state["state"].items():
        optimizer.state[mine.get(key, key)] = value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."
