"""State of an optimizer under the names of the parameters: a rank of a pipeline has only some
parameters of a group.

Torch's distributed checkpoints are not used: they create missing state by a step with a learning
rate of 0 (on the replica that saves, and with the user's hooks), do not handle parameters that
were frozen or never used, and round loaded values to the type of the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from recover.checkpoint.directory import CheckpointError
from recover.gradients.optimizers import parameters_of
from recover.parallel import plain_name

FOLLOWS = ("params", "param_names")  # entries of a group that the script has set, and that are not loaded


class StoredState(Protocol):
    """The files of a checkpoint."""

    def names(self, prefix: str) -> list[str]: ...

    def kind(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and type of a tensor; None for other values."""

    def load(self, name: str, into: torch.Tensor) -> torch.Tensor: ...

    def value(self, name: str, current: Any) -> Any: ...


def named_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All tensors and values of an optimizer, under the names `state.PARAMETER.KEY` and
    `param_groups.PARAMETER.OPTION`.

    Where the optimizer has a value under other keys than that name says, `key.PARAMETER.KEY` is
    the path to it.
    """
    state_dict, names = optimizer.state_dict(), _names(model)
    found: dict[str, Any] = {}
    by_key: dict[Any, str] = {}
    for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, key in zip(group["params"], packed["params"], strict=True):
            by_key[key] = names[parameter]
            found |= {
                f"param_groups.{names[parameter]}.{option}": value
                for option, value in packed.items()
                if option not in FOLLOWS
            }
    for key, state in state_dict["state"].items():
        if key not in by_key:
            raise CheckpointError(
                f"the optimizer holds {key!r}, which belongs to no parameter: a checkpoint has no place for it; "
                "give it to recover.save as extra="
            )
        for way, value in _leaves(state):
            path = f"{by_key[key]}.{'.'.join(map(str, way))}"
            while f"state.{path}" in found:  # "0" and 0
                path += "~"
            found[f"state.{path}"] = value
            if way != [way[0]] or not isinstance(way[0], str) or "." in way[0] or way[0].isdigit():
                found[f"key.{path}"] = way
    return found


def load_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, stored: StoredState, prefix: str
) -> None:
    """Load the state of the optimizer's parameters; parameters without saved state get none. State
    of other parameters belongs to other optimizers, or to other ranks of a pipeline."""
    names = _names(model)
    numbers: dict[torch.Tensor, int] = {p: number for number, p in enumerate(parameters_of(optimizer))}
    parameters = {name: parameter for parameter, name in names.items()}
    states: dict[torch.Tensor, list[tuple[list[Any], Any]]] = {}
    ways = set(stored.names(f"{prefix}key."))
    for full in stored.names(f"{prefix}state."):
        rest = full.removeprefix(f"{prefix}state.")
        name, path = _split(rest, parameters)
        if name is not None and parameters[name] in numbers:
            key = f"{prefix}key.{rest}"
            way = stored.value(key, None) if key in ways else _way_of_old(path)
            states.setdefault(parameters[name], []).append((way, _load(stored, full, parameters[name])))
    groups = [
        _options(group, stored, [f"{prefix}param_groups.{names[p]}." for p in group["params"][:1]])
        | {"params": [numbers[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    own = _loads_otherwise(optimizer)
    held = {
        numbers[p]: _nested([(way, value) for way, value in state if own or _is_known_to_torch(value)])
        for p, state in states.items()
    }
    optimizer.load_state_dict({"state": held, "param_groups": groups})
    if own:
        return
    for parameter, state in states.items():  # again without the cast to the type of the parameter
        for (*way, last), value in state:
            place: Any = optimizer.state.get(parameter, {})
            for key in way:
                place = place.setdefault(key, {})
            place[last] = _exact(value, place.get(last))


def _is_known_to_torch(value: Any) -> bool:
    """Whether Optimizer.load_state_dict keeps this value: it takes other iterables, such as strings and
    arrays, apart."""
    if isinstance(value, list | tuple):
        return all(map(_is_known_to_torch, value))
    return isinstance(value, torch.Tensor | bool | int | float | None)


def _exact(value: Any, loaded: Any) -> Any:
    """`value`, with its tensors on the devices that torch has chosen."""
    if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == value.dtype else value.to(loaded.device)
    if isinstance(value, list | tuple) and isinstance(loaded, list | tuple) and len(value) == len(loaded):
        return type(value)(_exact(*pair) for pair in zip(value, loaded, strict=True))
    return value


def _names(model: torch.nn.Module) -> dict[torch.Tensor, str]:
    """Names of all parameters, without the prefixes of wrappers."""
    wrappers = [
        f"{prefix}." if prefix else ""
        for prefix, module in model.named_modules()
        if isinstance(module, DistributedDataParallel)
    ]

    def bare(name: str) -> str:
        for at in reversed(wrappers):  # the inner ones first
            if name.startswith(f"{at}module."):
                name = at + name.removeprefix(f"{at}module.")
        return plain_name(name).replace("_orig_mod.", "")

    return {parameter: bare(name) for name, parameter in model.named_parameters()}


def _loads_otherwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's load_state_dict is not torch's own, or has hooks."""
    own = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
    return own or bool(getattr(optimizer, "_optimizer_load_state_dict_post_hooks", None))


def _leaves(state: Mapping[Any, Any], way: Sequence[Any] = ()) -> Iterator[tuple[list[Any], Any]]:
    for key, value in state.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, [*way, key])
        else:
            yield [*way, key], value


def _way_of_old(path: str) -> list[Any]:
    """The path of a value without a `key` entry."""
    return [int(key) if key.isdigit() else key for key in path.split(".")]


def _nested(state: Sequence[tuple[list[Any], Any]]) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    for (*way, last), value in state:
        place = made
        for key in way:
            place = place.setdefault(key, {})
        place[last] = value
    return made


def _split(name: str, parameters: Mapping[str, Any]) -> tuple[str | None, str]:
    """The parameter and the path of the value: the name of a parameter may be a prefix of another."""
    parameter, path = name, ""
    while parameter not in parameters:
        parameter, _, last = parameter.rpartition(".")
        if not parameter:
            return None, ""
        path = f"{last}.{path}" if path else last
    return parameter, path


def _load(stored: StoredState, name: str, parameter: torch.Tensor) -> Any:
    if (kind := stored.kind(name)) is None:
        return stored.value(name, None)
    shape, dtype = kind
    mesh: Any = getattr(parameter, "device_mesh", None)
    if shape and shape == tuple(parameter.shape):  # with the placements of the parameter
        room = torch.empty_like(parameter.detach(), dtype=dtype)
    elif not shape or mesh is None:
        room = torch.empty(shape, dtype=dtype)  # the optimizer chooses the device
    else:  # such as averages of rows: sharded along common dimensions, otherwise replicated
        from torch.distributed import tensor as dtensor

        placements: Any = parameter.placements  # type: ignore[attr-defined]
        dims = [placement.dim for placement in placements if placement.is_shard()]
        if any(dim >= len(shape) or shape[dim] != parameter.shape[dim] for dim in dims):
            placements = [dtensor.Replicate()] * mesh.ndim
        room = dtensor.empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return stored.load(name, room)


def _options(group: Mapping[str, Any], stored: StoredState, prefixes: list[str]) -> dict[str, Any]:
    """Options of a group: those of its first parameter in the files. A group without parameters is
    unchanged."""
    options = {option: value for option, value in group.items() if option not in FOLLOWS}
    for prefix in prefixes:
        more = {name.removeprefix(prefix) for name in stored.names(prefix)}
        for option in sorted(options.keys() | {name for name in more if "." not in name}):
            current, name = options.get(option), prefix + option
            if option in FOLLOWS:
                continue
            if (kind := stored.kind(name)) is None:
                options[option] = stored.value(name, current)
            else:
                shape, dtype = kind
                device = current.device if isinstance(current, torch.Tensor) else None
                options[option] = stored.load(name, torch.empty(shape, dtype=dtype, device=device))
    return options
