"""A user's values as tensors and JSON: nothing in a file can run code, so nothing is pickled.

Tensors are taken out and stored beside the model's; what is left is JSON, in which dicts keep their keys and tuples
stay tuples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

KIND = "recover"  # the key that marks what JSON has no word for


def pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON for this value; its tensors go to `tensors`, under names that begin with `name`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        while name in tensors:  # {"a": {"b": ...}, "a.b": ...}
            name += "_"
        tensors[name] = value.detach()
        return {KIND: "tensor", "name": name}
    if isinstance(value, dict):
        if KIND not in value and all(isinstance(key, str) for key in value):
            return {key: pack(each, f"{name}.{key}", tensors) for key, each in value.items()}
        pairs = [
            [pack(key, f"{name}.key{number}", tensors), pack(each, f"{name}.{key}", tensors)]
            for number, (key, each) in enumerate(value.items())
        ]
        return {KIND: "dict", "pairs": pairs}
    if isinstance(value, list | tuple):
        packed = [pack(each, f"{name}.{number}", tensors) for number, each in enumerate(value)]
        return packed if isinstance(value, list) else {KIND: "tuple", "values": packed}
    raise TypeError(
        f"{name} is a {type(value).__name__}, which a checkpoint does not hold; give tensors, numbers, strings, lists, "
        "tuples, dicts, or an object with state_dict() and load_state_dict() of them"
    )


def unpack(packed: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value again; `tensor` finds a tensor by its name."""
    if isinstance(packed, list):
        return [unpack(each, tensor) for each in packed]
    if not isinstance(packed, dict):
        return packed
    kind = packed.get(KIND)
    if kind == "tensor":
        return tensor(packed["name"])
    if kind == "tuple":
        return tuple(unpack(each, tensor) for each in packed["values"])
    if kind == "dict":
        return {unpack(key, tensor): unpack(each, tensor) for key, each in packed["pairs"]}
    return {key: unpack(each, tensor) for key, each in packed.items()}
