"""Values as JSON and tensors, for checkpoints and for the state that is handed to a joining
replica.

Nothing is pickled, so nothing that is read from a file or received from another rank can run
code. Tensors are taken out: the caller stores them and puts a reference into the JSON. Dicts
keep their keys, and tuples, sets, bytes, numpy values and the usual subclasses of dict keep
their type. A value of any other type is refused by its name.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

KIND = "recover"  # the key that marks a value for which JSON has no form
FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, list, dict, set)}
REMEDY = (
    "give tensors, numpy arrays, numbers, strings, lists, tuples, dicts, or an object with state_dict() and "
    "load_state_dict() of them"
)

Keep = Callable[[str, torch.Tensor], Any]  # name and tensor: stores the tensor, returns its reference
Find = Callable[[Any], torch.Tensor]


class NotPackableError(TypeError):
    """A value that is neither JSON nor made of tensors."""


def pack(value: Any, name: str, keep: Keep) -> Any:
    """JSON for this value; `keep` gets its tensors, under names that begin with `name`.

    Raises NotPackableError with the name of the entry that has no such form.
    """
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, str | bytes):
        return _pack_numpy(value, name, keep)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise _refused(name, f"a tensor of layout {value.layout}", "make it dense")
        return {KIND: "tensor", "name": keep(name, value.detach())}
    if isinstance(value, dict):
        return _pack_dict(value, name, keep)
    if isinstance(value, list):
        return _pack_all(value, name, keep)
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            raise _refused(name, f"the named tuple {type(value).__name__}", "make it a tuple or a dict")
        kind = "size" if isinstance(value, torch.Size) else "tuple"
        return {KIND: kind, "values": _pack_all(value, name, keep)}
    if isinstance(value, deque):
        return {KIND: "deque", "values": _pack_all(value, name, keep), "most": value.maxlen}
    if isinstance(value, set | frozenset):
        # In one order on all replicas: a digest is taken of it.
        values = _pack_all(sorted(value, key=lambda each: (type(each).__name__, repr(each))), name, keep)
        return {KIND: type(value).__name__, "values": values}
    if isinstance(value, bytes | bytearray):
        return {KIND: type(value).__name__, "base64": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {KIND: "complex", "values": [value.real, value.imag]}
    if isinstance(value, torch.dtype):
        return {KIND: "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {KIND: "device", "name": str(value)}
    raise _refused(name, f"a {type(value).__name__}", REMEDY)


def unpack(packed: Any, find: Find) -> Any:
    """The value that was packed; `find` returns the tensor of a reference."""
    if isinstance(packed, list):
        return [unpack(each, find) for each in packed]
    if not isinstance(packed, dict):
        return packed
    if KIND not in packed:
        return {key: unpack(each, find) for key, each in packed.items()}
    kind = packed[KIND]
    if kind == "tensor":
        return find(packed["name"])
    if kind == "numpy":
        array = find(packed["name"]).cpu().numpy()
        return array[()] if packed["scalar"] else array
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray)(base64.b64decode(packed["base64"]))
    if kind == "dtype":
        dtype = getattr(torch, packed["name"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch.{packed['name']} is no type of a tensor")
        return dtype
    if kind == "device":
        return torch.device(packed["name"])
    if "pairs" in packed:
        pairs = {unpack(key, find): unpack(each, find) for key, each in packed["pairs"]}
        return _dict_of_kind(kind, pairs, packed, find)
    values = [unpack(each, find) for each in packed["values"]]
    if kind == "deque":
        return deque(values, maxlen=packed["most"])
    if kind == "complex":
        return complex(*values)
    sequences: dict[str, Any] = {"tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset}
    return sequences[kind](values)


def _pack_all(values: Any, name: str, keep: Keep) -> list[Any]:
    return [pack(each, f"{name}.{number}", keep) for number, each in enumerate(values)]


def _pack_dict(value: dict[Any, Any], name: str, keep: Keep) -> dict[str, Any]:
    if type(value) not in (OrderedDict, Counter, defaultdict):  # others are restored as plain dicts
        if KIND not in value and all(type(key) is str for key in value):
            return {key: pack(each, f"{name}.{key}", keep) for key, each in value.items()}
        kind = "dict"
    else:
        kind = type(value).__name__
    pairs = [
        [pack(key, f"{name}.key{number}", keep), pack(each, f"{name}.{key}", keep)]
        for number, (key, each) in enumerate(value.items())
    ]
    packed: dict[str, Any] = {KIND: kind, "pairs": pairs}
    if isinstance(value, defaultdict) and value.default_factory is not None:
        packed["factory"] = getattr(value.default_factory, "__name__", "")
        if FACTORIES.get(packed["factory"]) is not value.default_factory:
            raise _refused(name, f"a defaultdict of {value.default_factory}", "make it a plain dict")
    # The version of each module, which its state_dict() carries as an attribute.
    if (metadata := getattr(value, "_metadata", None)) is not None:
        packed["metadata"] = pack(metadata, f"{name}._metadata", keep)
    return packed


def _dict_of_kind(kind: str, pairs: dict[Any, Any], packed: dict[str, Any], find: Find) -> dict[Any, Any]:
    if kind == "OrderedDict":
        made = OrderedDict(pairs)
        if "metadata" in packed:
            made._metadata = unpack(packed["metadata"], find)  # type: ignore[attr-defined]
        return made
    if kind == "Counter":
        return Counter(pairs)
    if kind == "defaultdict":
        return defaultdict(FACTORIES[packed["factory"]] if "factory" in packed else None, pairs)
    return pairs


def _pack_numpy(value: Any, name: str, keep: Keep) -> dict[str, Any]:
    array = np.array(value)  # a copy, in rows
    try:
        tensor = torch.from_numpy(array.reshape(-1)).view(array.shape)
    except (TypeError, ValueError):
        raise _refused(name, f"a numpy array of {array.dtype}", "give numbers that torch knows") from None
    return {KIND: "numpy", "name": keep(name, tensor), "scalar": isinstance(value, np.generic)}


def _refused(name: str, what: str, remedy: str) -> NotPackableError:
    return NotPackableError(f"{name} is {what}, which has no form as JSON and tensors; {remedy}")


class NamedTensors(dict[str, torch.Tensor]):
    """A `Keep` that stores tensors under names of their own, which are their references."""

    def __call__(self, name: str, tensor: torch.Tensor) -> str:
        while name in self:  # {"a": {"b": ...}, "a.b": ...}
            name += "_"
        self[name] = tensor
        return name
