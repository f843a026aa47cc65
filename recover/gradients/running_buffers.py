"""Running buffers: buffers that forward changes, such as the statistics of BatchNorm, and others
that the user names.

The result depends neither on which replica computed which microbatch, nor on deaths. Every
microbatch of a step starts from the buffers at the beginning of the step. The change by its forward
pass is summed over the slots as gradients are, in the reduction of the totals. On a commit, a
floating-point buffer gets the mean of the changes added, an integer buffer (a counter) their sum. A
cumulative average (BatchNorm with momentum=None) stays one.

All other buffers must not change between the first microbatch of a step and its end: replicas
would drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase

from recover.gradients.deferred import DeviceValue, Numbers
from recover.gradients.parts import on_device
from recover.gradients.reduction import Sum
from recover.gradients.replica_interface import Replica
from recover.gradients.state_hash import fingerprint

COUNTER = "num_batches_tracked"
_BETWEEN = "change it between two steps, on all replicas alike"
Place = tuple[torch.nn.Module, str]  # module and name: forward may replace the tensor


class RunningBuffers:
    """The running buffers of one model: their values at the beginning of the step, and the sum
    of changes of this replica."""

    def __init__(
        self,
        model: torch.nn.Module,
        named: Iterable[str],
        sum_: Sum,
        replica: Replica,
        watch_frozen: bool = False,
    ) -> None:
        """`watch_frozen`: also check that frozen parameters do not change; not for wrappers that
        replace them."""
        places = {
            f"{prefix}.{name}" if prefix else name: (module, name)
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        named = set(named)
        if unknown := sorted(named - places.keys()):
            raise ValueError(
                f"buffers={unknown}: the model has no such buffer; its buffers are {sorted(places)}"
            )
        moving = {name for name, place in places.items() if name in named or _keeps_statistics(*place)}
        for name in sorted(moving):
            kind = getattr(*places[name]).dtype
            if kind == torch.bool or kind.is_complex:
                raise ValueError(
                    f"buffer {name!r} is of {kind}: changes of it cannot be averaged; leave it out"
                )
        if moving and not replica.peers_hold_all_buffers:
            raise ValueError(
                f"forward changes the buffers {', '.join(sorted(moving))}, and the ranks of a grid cannot keep them "
                "equal; use a norm without running statistics (LayerNorm, RMSNorm, GroupNorm), or recover.hsdp"
            )
        self._sum = sum_
        self._moving = {name: places[name] for name in sorted(moving)}
        self._others = {name: place for name, place in places.items() if name not in moving}
        # Not in a sharded model: its parameters' names refer to other tensors while it computes.
        if watch_frozen and replica.size == 1:
            self._others |= _frozen(model)
        # For each other buffer: the tensor, the address of its memory, its version, its hash.
        self._seen: dict[str, tuple[torch.Tensor, int, int, DeviceValue[int]]] = {}
        self._start: list[torch.Tensor] = []
        self._moved = False  # since the step began
        self._sizes = [getattr(*place).numel() for place in self._moving.values()]
        self.size = sum(self._sizes)
        if sum_.exponents is not None:
            sum_.exponents.name("buffers", list(self._moving))
        # The buffer of each number in the row of changes.
        self._owners = torch.arange(len(self._sizes)).repeat_interleave(
            torch.tensor(self._sizes, dtype=torch.int64)
        )
        if self.size:
            self._owners = on_device(self._owners, self.tensors()[0].device)
        self.clear()

    @property
    def changes(self) -> Numbers:
        """Changes of this replica's slots, as they enter the reduction."""
        return self._read.value[: self.size] if self.size else np.zeros(0)

    @property
    def largest(self) -> list[float]:
        """The largest change of each running buffer by a microbatch; infinity if one is not
        finite."""
        return self._read.value[self.size :].tolist() if self.size else [0.0] * len(self._moving)

    @property
    def unread(self) -> list[DeviceValue[Any]]:
        """Values that `changes` and `largest` read from a device."""
        return [self._read] if self.size else []

    @property
    def names(self) -> list[str]:
        return list(self._moving)

    def tensors(self) -> list[torch.Tensor]:
        return [getattr(*place) for place in self._moving.values()]

    def at_start(self) -> list[tuple[str, torch.Tensor]]:
        """Running buffers by name, with their values at the beginning of the step."""
        return list(zip(self._moving, self._start if self._moved else self.tensors(), strict=True))

    def begin(self) -> None:
        """Begin a step."""
        if self._moved:  # a step was left early
            self.restore()
        self._start = [tensor.detach().clone() for tensor in self.tensors()]
        self.clear()

    def clear(self) -> None:
        """Drop the changes of this step."""
        if not self.size:
            return
        # The sum of the changes, followed by the largest change of each buffer.
        device = self.tensors()[0].device
        self._summed = torch.zeros(self.size + len(self._sizes), dtype=torch.float64, device=device)
        self._read = DeviceValue(_as_they_are, self._summed)

    def hand_out(self) -> None:
        """Prepare for a microbatch that is about to run."""
        if self._moved:
            self.restore()
        self._moved = self.size > 0
        for name in self._others:
            self._look(name)

    def take(self) -> None:
        """Take the changes after the forward pass, and before its backward, which may run parts
        of forward again."""
        self._refuse_changes(
            "while a microbatch was computed",
            "if it is a statistic, recover.Step(..., buffers=[{name!r}]) keeps it equal, by the mean of the changes "
            "over the step; otherwise make it a plain attribute, or do not change it",
        )
        if not self.size:
            return
        pairs = zip(self.tensors(), self._start, strict=True)
        change = torch.cat([(now.detach().double() - was.double()).flatten() for now, was in pairs])
        magnitudes = change.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
        self._summed[self.size :].scatter_reduce_(0, self._owners, magnitudes, "amax")
        self._summed[: self.size] += self._sum.change(change, list(self._moving), self._sizes)
        self._read = DeviceValue(_as_they_are, self._summed)

    def refuse_later_changes(self) -> None:
        """Raise if a buffer has changed between forward and the end of the loop body."""
        self._refuse_changes(
            "after the forward pass of a microbatch, in its backward pass or in the loop",
            f"{_BETWEEN}; or, if it is a statistic, in forward, and name it by recover.Step(..., buffers=[{{name!r}}])",
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values at the beginning of the step."""
        for tensor, was in zip(self.tensors(), self._start, strict=True):
            tensor.copy_(was)
        self._moved = False

    @torch.no_grad()
    def settle(self, changes: torch.Tensor, microbatches: int) -> None:
        """On a commit: apply the changes, summed over all microbatches of the step."""
        self._moved = False
        if not self.size:
            return
        parts = on_device(changes, self._start[0].device).split([start.numel() for start in self._start])
        for name, tensor, was, change in zip(self._moving, self.tensors(), self._start, parts, strict=True):
            change = change.view(was.shape)
            if was.is_floating_point():
                tensor.copy_(was.double() + change / microbatches * self._pace(name, microbatches))
            else:
                tensor.copy_(was + change.round().to(was.dtype))

    def _pace(self, name: str, microbatches: int) -> torch.Tensor | float:
        """Factor for a cumulative average (BatchNorm with momentum=None): each microbatch was averaged
        as number `before + 1`, and together they are `microbatches`."""
        module, _ = self._moving[name]
        if not isinstance(module, _NormBase) or module.momentum is not None:
            return 1.0
        starts = dict(zip(self._moving.values(), self._start, strict=True))
        before = starts[module, COUNTER].double()
        return (before + 1) * microbatches / (before + microbatches)

    def _refuse_changes(self, when: str, remedy: str) -> None:
        """`remedy`: what to do about a buffer."""
        for name, place in self._others.items():
            before, after = self._seen[name][-1], self._look(name)
            if after is before or after.value == before.value:
                continue
            if isinstance(getattr(*place), torch.nn.Parameter):
                raise RuntimeError(
                    f"the frozen parameter {name!r} was changed {when}; how often that happens depends on how many "
                    f"replicas there are, and on who dies; {_BETWEEN}"
                )
            raise RuntimeError(
                f"the buffer {name!r} was changed {when}, and would differ between replicas; {remedy.format(name=name)}"
            )

    def _look(self, name: str) -> DeviceValue[int]:
        """The hash of a buffer that must not change; computed again only if it may have been
        written to."""
        tensor = getattr(*self._others[name])
        version = 0 if tensor.is_inference() else tensor._version
        known = self._seen.get(name)
        if tensor.requires_grad and known is not None:
            return known[-1]  # it is trained now: the fingerprint of the vote covers it
        memory = tensor.data_ptr()
        if known is None or known[0] is not tensor or known[1:3] != (memory, version):
            self._seen[name] = tensor, memory, version, fingerprint([tensor], 0)
        return self._seen[name][-1]


def _frozen(model: torch.nn.Module) -> dict[str, Place]:
    """Frozen parameters, such as those of an EMA copy."""
    return {
        f"{prefix}.{name}" if prefix else name: (module, name)
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and not parameter.requires_grad and not hasattr(parameter, "_local_tensor")
    }


def _as_they_are(numbers: Numbers) -> Numbers:
    return numbers


def _keeps_statistics(module: torch.nn.Module, name: str) -> bool:
    """Whether the buffer belongs to BatchNorm, SyncBatchNorm or InstanceNorm, of any dimension."""
    return isinstance(module, _NormBase)
