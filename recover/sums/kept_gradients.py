"""Optimizers that keep the gradients that they are given (the last one, say): in a plain loop those are their own.

Here they lie in memory that the next step sums into. Whoever keeps them is found out by what it holds, and is given
copies from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, MutableSequence
from typing import Any

import torch

from recover.sums.parts import local_part

LOOKS = 3  # updates after which it is known what an optimizer holds


class KeptGradients:
    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._looks = optimizer, LOOKS

    def found_in(self, memory: Iterable[torch.Tensor]) -> bool:
        """Whether the optimizer, which has just run, holds a part of this memory; if so, it has a copy now."""
        if not self._looks:
            return False
        self._looks -= 1
        lent = {address for tensor in memory if (address := _address(tensor))}
        found = False
        for place, key, tensor in _tensors(getattr(self._optimizer, "state", {})):
            if _address(local_part(tensor)) in lent:
                place[key], found = tensor.clone(), True
        return found


def _address(tensor: torch.Tensor) -> int:
    """Of its memory; 0 if it has none, or none of its own: sparse ones, and those that are made of others."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _tensors(held: Any) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """All of them, and where they are."""
    if isinstance(held, MutableMapping):
        members: list[tuple[Any, Any]] = list(held.items())
    elif isinstance(held, MutableSequence):
        members = list(enumerate(held))
    else:
        return
    for key, value in members:
        if isinstance(value, torch.Tensor):
            yield held, key, value
        else:
            yield from _tensors(value)
