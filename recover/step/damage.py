"""What faults do to tensors, on schedule: the probe tells when, and knows nothing of them itself."""

from __future__ import annotations

from collections.abc import Callable

import torch

from recover.step.gradients import Gradients
from recover.step.parts import as_real, local_part

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def damages(model: torch.nn.Module, gradients: Gradients) -> dict[str, Callable[[object], None]]:
    """What the actions of `recover.faults` do to this model; each gets the detail of the place, a bucket's number."""

    def weights(_: object) -> None:
        flip(next(part for p in model.parameters() if (part := local_part(p.detach())).numel()))

    def gradient(bucket: object) -> None:
        flip(gradients.buckets[int(str(bucket))].local)

    def not_a_number(bucket: object) -> None:
        gradients.buckets[int(str(bucket))].local.view(-1)[0] = float("nan")

    return {"corrupt:weights": weights, "corrupt:gradient": gradient, "nan": not_a_number}


def flip(tensor: torch.Tensor) -> None:
    """Flip one bit: the highest of the mantissa of the largest value, where it makes a difference."""
    values = as_real(tensor).view(-1)
    at = int(values.abs().argmax())
    mantissa = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}[values.dtype]
    values.view(_INTEGERS[values.element_size()])[at] ^= 1 << (mantissa - 1)
