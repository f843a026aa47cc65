"""What a rank holds of the state of a run, taken apart: tensors, which travel as they are, and all the rest.

A rank gives its own part to the rank of the same place in a replica that joins, so nothing is gathered: of a tensor
that is sharded over the replica, its local part travels. The rest (numbers, settings, what a user has added) is
pickled, with a place for each tensor: an optimizer that has not run yet has none, and gets those of the others.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from recover.sums.parts import in_order_of, local_part


class Stateful(Protocol):
    """What a user may add to the state, by name."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class OtherStateError(ValueError):
    """This process was started to join others that hold another kind of state."""


@dataclass(frozen=True)
class _Sharded:
    """How a tensor is spread over the ranks of a replica."""

    mesh: tuple[Any, ...]  # tells the meshes of one model apart
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _Place:
    """Where a tensor was taken out of the rest."""

    number: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    on_device: bool  # where the model is; otherwise on the host
    sharded: _Sharded | None


class Parcel:
    """The state of a rank that gives it, or of one that takes it. `parts`: the bytes of its tensors."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, scheduler: Any, extra: Mapping[str, Stateful]):
        self._model, self._optimizer, self._scheduler, self._extra = model, optimizer, scheduler, extra
        self._named = [*model.named_parameters(), *model.named_buffers()]
        self._device = local_part(self._named[0][1]).device
        self._tensors = [local_part(tensor.detach()) for _, tensor in self._named]
        self._late: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # what has no bytes in a row, and a copy that has
        self._rest: dict[str, Any] = {}

    def pack(self, position: Mapping[str, Any]) -> tuple[bytes, list[torch.Tensor]]:
        """The head, which says what the parts are, and the parts. `position`: where the run stands."""
        rest = {
            "optimizer": self._optimizer.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "extra": {name: each.state_dict() for name, each in self._extra.items()},
            "position": dict(position),
        }
        found: list[torch.Tensor] = []
        rest = _rebuilt(rest, lambda tensor: self._take_out(tensor, found))
        parts = [_bytes(tensor.contiguous()) for tensor in (*self._tensors, *found)]
        return pickle.dumps((self._kinds, [p.requires_grad for p in self._model.parameters()], rest)), parts

    def open(self, head: bytes) -> list[torch.Tensor]:
        """The parts of the same shape here, to be filled. Raises OtherStateError where the others hold another one."""
        kinds, trained, self._rest = pickle.loads(head)
        self._compare(kinds)
        for parameter, is_trained in zip(self._model.parameters(), trained, strict=True):
            parameter.requires_grad_(is_trained)
        room: dict[int, torch.Tensor] = {}
        _rebuilt(self._rest, lambda place: room.setdefault(place.number, self._room_for(place)), _Place)
        self._found = [room[number] for number in sorted(room)]
        rows = [
            tensor if tensor.is_contiguous() else torch.empty_like(tensor).contiguous()
            for tensor in self._tensors
        ]
        self._late = [(mine, row) for mine, row in zip(self._tensors, rows, strict=True) if mine is not row]
        return [_bytes(tensor) for tensor in (*rows, *self._found)]

    @property
    def position(self) -> dict[str, Any]:
        """Where the run stands, as soon as it is open; what of it are tensors comes with the parts."""
        position: dict[str, Any] = self._rest["position"]
        return position

    def install(self) -> dict[str, Any]:
        """All parts are filled: make it this rank's state. Returns the position."""
        for mine, row in self._late:
            mine.copy_(row)
        rest = _rebuilt(self._rest, self._put_back, _Place)
        self._fill_optimizer(rest["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(rest["scheduler"])
        for name, each in self._extra.items():
            each.load_state_dict(rest["extra"][name])
        position: dict[str, Any] = rest["position"]
        return position

    @property
    def _kinds(self) -> dict[str, Any]:
        """What must be alike, and how it is called to whoever has to mend it."""
        groups = [len(group["params"]) for group in self._optimizer.param_groups]
        return {
            "parameters and buffers (name, type, shape here)": [
                (name, str(tensor.dtype), tuple(tensor.shape))
                for (name, _), tensor in zip(self._named, self._tensors, strict=True)
            ],
            "parameters in each group of the optimizer": groups,
            "kind of scheduler": type(self._scheduler).__name__,
            "names in extra=": sorted(self._extra),
        }

    def _compare(self, theirs: Mapping[str, Any]) -> None:
        for what, here in self._kinds.items():
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

    def _take_out(self, tensor: torch.Tensor, found: list[torch.Tensor]) -> _Place:
        part = local_part(tensor.detach())
        found.append(part)
        sharded = None
        if part is not tensor and hasattr(tensor, "device_mesh"):
            its: Any = tensor
            sharded = _Sharded(_mesh_key(its.device_mesh), tuple(its.placements), its.shape, its.stride())
        here = part.device == self._device
        return _Place(len(found) - 1, part.dtype, part.shape, part.stride(), here, sharded)

    def _room_for(self, place: _Place) -> torch.Tensor:
        device = self._device if place.on_device else torch.device("cpu")
        return torch.empty(place.shape, dtype=place.dtype, device=device)

    def _put_back(self, place: _Place) -> torch.Tensor:
        theirs = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="meta")
        tensor = in_order_of(theirs, self._found[place.number])  # all travel by rows
        if place.sharded is None:
            return tensor
        from torch.distributed.tensor import DTensor

        meshes = {
            _mesh_key(p.device_mesh): p.device_mesh for _, p in self._named if hasattr(p, "device_mesh")
        }
        return DTensor.from_local(
            tensor,
            meshes[place.sharded.mesh],
            place.sharded.placements,
            run_check=False,
            shape=place.sharded.shape,
            stride=place.sharded.stride,
        )

    def _fill_optimizer(self, state: Mapping[str, Any]) -> None:
        """As `load_state_dict` does, but to the bit: that one casts to the type of the parameter."""
        held: dict[Any, Any] = {}
        for group, theirs in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
            held |= dict(zip(theirs["params"], group["params"], strict=True))
            group.update({name: value for name, value in theirs.items() if name != "params"})
        self._optimizer.state.clear()
        for key, value in state["state"].items():
            self._optimizer.state[held.get(key, key)] = value


def _rebuilt(value: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """The same nest of dictionaries, lists and tuples, with everything of this kind changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        made = {key: _rebuilt(each, change, kind) for key, each in value.items()}
        return made if type(value) is dict else _like(value, made)
    if isinstance(value, list):
        return [_rebuilt(each, change, kind) for each in value]
    if isinstance(value, tuple):
        made_of = [_rebuilt(each, change, kind) for each in value]
        return type(value)(*made_of) if hasattr(value, "_fields") else tuple(made_of)
    return value


def _like(value: dict[Any, Any], made: dict[Any, Any]) -> dict[Any, Any]:
    """Of the kind of `value`: an OrderedDict, say, with attributes of its own."""
    copy = value.copy()
    copy.update(made)
    return copy


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _mesh_key(mesh: Any) -> tuple[Any, ...]:
    return mesh.mesh_dim_names, tuple(mesh.shape)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."


def buffers_like(tensors: Sequence[torch.Tensor]) -> Callable[[int], torch.Tensor]:
    """Makes buffers of 8-byte words where these tensors are."""
    device = tensors[0].device

    def make(words: int) -> torch.Tensor:
        return torch.empty(words, dtype=torch.int64, device=device)

    return make
