"""Finds operations that are not deterministic: a microbatch runs twice, and the first operations
that give different results from the same inputs are named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recover.gradients.gradient_hash import GradientHash
from recover.gradients.parts import local_part

Call = tuple[str, int, int]  # operation, hash of its inputs, hash of its results


class OperationRecorder(TorchDispatchMode):
    """A context around forward and backward of a microbatch, on the thread that calls it. Each
    operation waits for its device: use it for a diagnosis only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _hash(args, kwargs)
        result = func(*args, **(kwargs or {}))
        self.calls.append((str(func), given, _hash(result)))
        return result


def not_deterministic(first: list[Call], second: list[Call]) -> list[str]:
    """Names of operations with equal inputs and different results, in two runs of a microbatch."""
    names = {
        one[0]
        for one, other in zip(first, second, strict=False)
        # Memory that an operation has only allocated has no value yet.
        if one[:2] == other[:2] and one[2] != other[2] and "empty" not in one[0]
    }
    return sorted(names)


def _hash(*values: Any) -> int:
    total = GradientHash(str)
    for number, tensor in enumerate(_tensors(values)):
        part = local_part(tensor)
        if part.layout is torch.strided and part.numel() and part.device.type != "meta":
            total.add_value(str(number), part.to(torch.uint8) if part.dtype is torch.bool else part)
    return total.value().value


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
