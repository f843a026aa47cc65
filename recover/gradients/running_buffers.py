"""Buffers that forward changes: the running statistics of BatchNorm, and others that the user names.

The rule does not depend on who computed what, nor on who died. Every microbatch of a step starts from the buffers as
they were when the step began. What its forward pass did to them is taken as a change, and changes are summed over the
slots as gradients are, in the same reduction. When the step commits, a buffer of numbers with fractions becomes what it
was plus the mean of the changes, and one of whole numbers (a counter) what it was plus their sum. An average over all
microbatches that ever were (BatchNorm with momentum=None) is just that.

Any other buffer must stay as it is from the first microbatch of a step to its end: replicas would drift apart.
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
Place = tuple[torch.nn.Module, str]  # forward may put another tensor under the name


class RunningBuffers:
    """Those of one model: what they were when the step began, and the sum of the changes of this replica's slots."""

    def __init__(
        self,
        model: torch.nn.Module,
        named: Iterable[str],
        sum_: Sum,
        replica: Replica,
        watch_frozen: bool = False,
    ) -> None:
        """`watch_frozen`: parameters that are, too, must stay; not where a wrapper moves them about."""
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
        if moving and not replica.mates_hold_all_buffers:
            raise ValueError(
                f"forward changes the buffers {', '.join(sorted(moving))}, and the ranks of a grid cannot keep them "
                "equal; use a norm without running statistics (LayerNorm, RMSNorm, GroupNorm), or recover.hsdp"
            )
        self._sum = sum_
        self._moving = {name: places[name] for name in sorted(moving)}
        self._others = {name: place for name, place in places.items() if name not in moving}
        if (
            watch_frozen and replica.size == 1
        ):  # a sharded model puts other tensors under their names while it computes
            self._others |= _frozen(model)
        # Of the others: the tensor, where its memory is, its version, its bits.
        self._seen: dict[str, tuple[torch.Tensor, int, int, DeviceValue[int]]] = {}
        self._start: list[torch.Tensor] = []
        self._moved = False  # since the step began
        self._sizes = [getattr(*place).numel() for place in self._moving.values()]
        self.size = sum(self._sizes)
        if sum_.exponents is not None:
            sum_.exponents.add_buffers(len(self._moving))
        # For each number of the row of changes, which buffer it is of.
        self._owners = torch.arange(len(self._sizes)).repeat_interleave(
            torch.tensor(self._sizes, dtype=torch.int64)
        )
        if self.size:
            self._owners = on_device(self._owners, self.tensors()[0].device)
        self.clear()

    @property
    def changes(self) -> Numbers:
        """Of this replica's slots, as they are reduced."""
        return self._read.value[: self.size] if self.size else np.zeros(0)

    @property
    def largest(self) -> list[float]:
        """For each running buffer, the largest change that a microbatch has made; infinity if one is not finite."""
        return self._read.value[self.size :].tolist() if self.size else [0.0] * len(self._moving)

    @property
    def unread(self) -> list[DeviceValue[Any]]:
        """What these two will read of a device."""
        return [self._read] if self.size else []

    def tensors(self) -> list[torch.Tensor]:
        return [getattr(*place) for place in self._moving.values()]

    def at_start(self) -> list[tuple[str, torch.Tensor]]:
        """The running buffers by name, as they were when the step began: forward may have changed them since."""
        return list(zip(self._moving, self._start if self._moved else self.tensors(), strict=True))

    def begin(self) -> None:
        """A step begins."""
        if self._moved:  # a step was left early
            self.restore()
        self._start = [tensor.detach().clone() for tensor in self.tensors()]
        self.clear()

    def clear(self) -> None:
        """Give up what this replica has summed in this step."""
        if not self.size:
            return
        # The sum of the changes, and behind it the largest one of each buffer.
        device = self.tensors()[0].device
        self._summed = torch.zeros(self.size + len(self._sizes), dtype=torch.float64, device=device)
        self._read = DeviceValue(_as_they_are, self._summed)

    def hand_out(self) -> None:
        """A microbatch is about to run."""
        if self._moved:
            self.restore()
        self._moved = self.size > 0
        for name in self._others:
            self._look(name)

    def take(self) -> None:
        """Its forward is through, and nothing of its backward, which may run parts of it again."""
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
        self._summed[: self.size] += self._sum.change(change, self._sizes)
        self._read = DeviceValue(_as_they_are, self._summed)

    def refuse_later_changes(self) -> None:
        """Its backward is through, and the loop has come back for the next one."""
        self._refuse_changes(
            "after the forward pass of a microbatch, in its backward pass or in the loop",
            f"{_BETWEEN}; or, if it is a statistic, in forward, and name it by recover.Step(..., buffers=[{{name!r}}])",
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Make them what they were when the step began."""
        for tensor, was in zip(self.tensors(), self._start, strict=True):
            tensor.copy_(was)
        self._moved = False

    @torch.no_grad()
    def settle(self, changes: torch.Tensor, microbatches: int) -> None:
        """The step has committed, and this is the sum over all of its microbatches."""
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
        """A cumulative average (BatchNorm with momentum=None) moves by one part in as many as there were. Each of the
        microbatches has taken itself for the next one; together they are so many."""
        module, _ = self._moving[name]
        if not isinstance(module, _NormBase) or module.momentum is not None:
            return 1.0
        starts = dict(zip(self._moving.values(), self._start, strict=True))
        before = starts[module, COUNTER].double()
        return (before + 1) * microbatches / (before + microbatches)

    def _refuse_changes(self, when: str, mend: str) -> None:
        """`mend`: what to do about a buffer."""
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
                f"the buffer {name!r} was changed {when}, and would differ between replicas; {mend.format(name=name)}"
            )

    def _look(self, name: str) -> DeviceValue[int]:
        """The bits of a buffer that is expected to stay, looked at again only if it may have been written to."""
        tensor = getattr(*self._others[name])
        version = 0 if tensor.is_inference() else tensor._version
        known = self._seen.get(name)
        if tensor.requires_grad and known is not None:
            return known[-1]  # it is trained by now, and in the vote
        memory = tensor.data_ptr()
        if known is None or known[0] is not tensor or known[1:3] != (memory, version):
            self._seen[name] = tensor, memory, version, fingerprint([tensor], 0)
        return self._seen[name][-1]


def _frozen(model: torch.nn.Module) -> dict[str, Place]:
    """Parameters that nobody trains: a copy of others that follows them, say."""
    return {
        f"{prefix}.{name}" if prefix else name: (module, name)
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and not parameter.requires_grad and not hasattr(parameter, "_local_tensor")
    }


def _as_they_are(numbers: Numbers) -> Numbers:
    return numbers


def _keeps_statistics(module: torch.nn.Module, name: str) -> bool:
    """Torch's own: BatchNorm, SyncBatchNorm, InstanceNorm, of any dimension."""
    return isinstance(module, _NormBase)
