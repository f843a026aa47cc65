"""Faults that damage tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from recover.faults.fault import OF_DEVICE, Fault

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


Damage = Callable[[Fault, object], None]  # takes the detail of the location, the number of a bucket


def damages(model: torch.nn.Module, gradients: Any, faults: Sequence[Fault]) -> dict[str, Damage]:
    """The actions on this model and its buckets, by kind. `faults`: those of this rank."""

    def weights(_: Fault, __: object) -> None:
        parts = (local_part(parameter.detach()) for parameter in model.parameters())
        flip(next(part for part in parts if part.numel()))  # of a sharded parameter, the local shard

    def not_a_number(_: Fault, bucket: object) -> None:
        gradients.buckets[int(str(bucket))].local.view(-1)[0] = float("nan")

    def result(_: Fault, __: object) -> None:
        flip(gradients.buckets[0].result)

    def err(fault: Fault, detail: object) -> None:
        if fault.location == "bucket":
            flip(gradients.buckets[int(str(detail))].local)
        else:
            assert device is not None
            device.begin(fault)

    of_device = [fault for fault in faults if fault.kind in OF_DEVICE]
    device = ErringDevice(model, str(of_device[0])) if of_device else None
    return {
        "corrupt:weights": weights,
        "nan": not_a_number,
        "corrupt:sum": result,
        **dict.fromkeys(OF_DEVICE, err),
    }


class ErringDevice:
    """A device that computes wrong results: the largest value of a layer's output, or of the
    gradient of that output, has a wrong bit. A device that errs once does so in the next layer that
    it computes; a device that errs again and again does so in one layer, which is drawn."""

    def __init__(self, model: torch.nn.Module, seed: str) -> None:
        self._rng = random.Random(seed)  # the generators of the training are untouched
        self._once: set[bool] = set()  # True: in forward, False: in backward
        self._chances = {True: 0.0, False: 0.0}
        layers = [
            module for module in model.modules() if next(module.parameters(recurse=False), None) is not None
        ]
        self._weak = self._rng.choice(layers)
        for layer in layers:
            layer.register_forward_hook(self._forward)

    def begin(self, fault: Fault) -> None:
        if fault.kind == "errs":
            self._chances[fault.location != "backward"] = fault.amount
        else:
            self._once.add(fault.action == "corrupt:activation")

    def _errs(self, layer: torch.nn.Module, in_forward: bool) -> bool:
        if in_forward in self._once:
            self._once.remove(in_forward)
            return True
        chance = self._chances[in_forward] if layer is self._weak else 0.0
        return chance > 0 and self._rng.random() < chance

    def _forward(self, layer: torch.nn.Module, _: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or not isinstance(output, torch.Tensor):  # not in an evaluation
            return output
        if self._errs(layer, in_forward=True):
            output = output.clone()
            flip(local_part(output.detach()))
        if output.requires_grad:
            output.register_hook(partial(self._backward, layer))
        return output

    def _backward(self, layer: torch.nn.Module, gradient: torch.Tensor) -> torch.Tensor:
        if self._errs(layer, in_forward=False):
            gradient = gradient.clone()
            flip(local_part(gradient))
        return gradient


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of this rank if the tensor is sharded, otherwise the tensor."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def flip(tensor: torch.Tensor) -> None:
    """Flip one bit: the highest of the mantissa of the largest value, so that it makes a
    difference; of integers, the highest one of the largest value."""
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
    at = int(values.abs().argmax())
    if not values.is_floating_point():
        values[at] ^= 1 << max(0, int(values[at].abs()).bit_length() - 1)
        return
    mantissa = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}[values.dtype]
    values.view(_INTEGERS[values.element_size()])[at] ^= 1 << (mantissa - 1)
