"""Faults that damage tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def damages(model: torch.nn.Module, gradients: Any) -> dict[str, Callable[[object], None]]:
    """The actions on this model and its buckets.

    Each takes the detail of the location, the number of a bucket.
    """

    def weights(_: object) -> None:
        parts = (getattr(p.detach(), "_local_tensor", p.detach()) for p in model.parameters())
        flip(next(part for part in parts if part.numel()))  # of a sharded parameter, the local shard

    def gradient(bucket: object) -> None:
        flip(gradients.buckets[int(str(bucket))].local)

    def not_a_number(bucket: object) -> None:
        gradients.buckets[int(str(bucket))].local.view(-1)[0] = float("nan")

    return {"corrupt:weights": weights, "corrupt:gradient": gradient, "nan": not_a_number}


def flip(tensor: torch.Tensor) -> None:
    """Flip one bit: the highest of the mantissa of the largest value, so that it makes a
    difference."""
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
    at = int(values.abs().argmax())
    mantissa = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}[values.dtype]
    values.view(_INTEGERS[values.element_size()])[at] ^= 1 << (mantissa - 1)
