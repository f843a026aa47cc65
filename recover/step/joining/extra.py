"""`extra=`: entries that the user adds to the state of a run, by name, for saving, resuming and
joining."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from recover.gradients.parts import local_part
from recover.step.joining.packing import NamedTensors, pack


class Stateful(Protocol):
    """An object whose state can be read and replaced."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


Extra = Stateful | dict[str, Any]  # a plain dict is its own state


def is_extra(value: Any) -> bool:
    """Whether the state of `value` can be replaced by the state of another replica."""
    return type(value) is dict or (hasattr(value, "state_dict") and hasattr(value, "load_state_dict"))


def refuse_other_extras(extra: Mapping[str, Any]) -> None:
    """Raises TypeError for an entry that cannot be sent to a joining replica."""
    for name, value in extra.items():
        if not is_extra(value):
            raise TypeError(
                f"extra[{name!r}] is a {type(value).__name__}, and a replica that joins could not be given it; give "
                "objects with state_dict() and load_state_dict(), or a dict that you change in place"
            )
        pack(state_of(value), f"extra[{name!r}]", NamedTensors())


def state_of(value: Any) -> Any:
    """The result of state_dict(), or the value itself."""
    return value.state_dict() if hasattr(value, "state_dict") else value


def restore(value: Any, state: Any) -> None:
    """Replace the state of `value`; a dict is changed in place."""
    if isinstance(value, dict):
        value.clear()
        value.update(state)
    else:
        value.load_state_dict(state)


def digest_of(value: Any) -> int:
    """64 bits over the whole state of an entry; of a sharded tensor, over the local part."""
    tensors = NamedTensors()
    digest = hashlib.blake2b(digest_size=8)
    digest.update(json.dumps(pack(state_of(value), "", tensors), sort_keys=True).encode())
    for name, tensor in tensors.items():
        part = local_part(tensor).cpu().contiguous()
        digest.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
        digest.update(part.view(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest())
