"""The gradients of a plain module: moved out of `p.grad` into buckets of our own as backward produces them.

Each parameter's gradient is added to its place in a flat fp32 bucket the moment autograd has finished it, and
freed. During the last microbatch of an attempt a bucket is reduced as soon as it is full, while backward goes on.
Buckets are always posted in the same order, whatever order autograd finishes them in: the replicas must match.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from recover.step.buckets import Bucket
from recover.step.reduction import FastSum, Sum

Post = Callable[[int, Bucket], None]
MEGABYTE = 1 << 20


class Gradients(Protocol):
    """Where a step's buckets come from."""

    sum: Sum

    @property
    def buckets(self) -> list[Bucket]: ...

    @property
    def in_range(self) -> bool:
        """Whether all that is in the local sums could be summed as promised."""

    def begin(self) -> None:
        """A new step: the local sums are empty."""

    def clear(self) -> None:
        """Give up what this replica has summed in this step."""

    def expect(self, post: Post | None) -> None:
        """A microbatch is about to run; if `post` is given it is the last one, and full buckets are posted."""

    def ready(self) -> None:
        """Its backward is about to run: a rewind that was left running beside the forward pass must have ended."""

    def collect(self) -> None:
        """Its backward is through: all of it is in the local sums, and if it was the last, posted."""

    def post_all(self, post: Post) -> None:
        """Post every bucket as it is: there was nothing (more) to run."""

    def rewind(self, overlapped: bool) -> None:
        """Make the local sums what they were; `overlapped`: microbatches follow that it may run beside."""

    def install(self, weight: float, shrink: float) -> None:
        """Give the optimizer the mean gradients: the sums divided by `weight`, then shrunk by clipping."""

    def release(self) -> None:
        """The optimizer is through with them."""


class OwnedGradients:
    """Buckets for the parameters of a module, filled by hooks that run when a parameter's gradient is complete."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], bucket_mb: float, sum: Sum | None = None
    ) -> None:
        self.sum: Sum = sum or FastSum()
        self.in_range = True
        self._parameters = [p for p in parameters if p.requires_grad]
        if not self._parameters:
            raise ValueError("the model has no parameter that requires a gradient; there is nothing to train")
        self._places: dict[torch.nn.Parameter, tuple[int, torch.Tensor]] = {}
        self.buckets = self._lay_out(bucket_mb)
        self._touched: set[torch.nn.Parameter] = set()
        self._open = False
        self._post: Post | None = None
        self._next = 0  # the next bucket to post
        self._waiting: list[int] = []
        self._seen: set[torch.nn.Parameter] = set()
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._take)

    def _lay_out(self, bucket_mb: float) -> list[Bucket]:
        """Last parameters first, as backward meets them; a bucket never mixes devices."""
        limit = max(1, int(bucket_mb * MEGABYTE / 4))
        groups: list[list[torch.nn.Parameter]] = []
        filled, device = limit, None
        for parameter in reversed(self._parameters):
            size = local_part(parameter).numel()
            if (filled and filled + size > limit) or parameter.device != device:
                groups.append([])
                filled, device = 0, parameter.device
            groups[-1].append(parameter)
            filled += size
        buckets = []
        for index, group in enumerate(groups):
            total = builtins.sum(local_part(p).numel() for p in group)
            bucket = Bucket(torch.zeros(total, dtype=self.sum.dtype, device=group[0].device))
            at = 0
            for parameter in group:
                shape, size = local_part(parameter).shape, local_part(parameter).numel()
                self._places[parameter] = (index, bucket.local[at : at + size].view(shape))
                at += size
            buckets.append(bucket)
        return buckets

    def begin(self) -> None:
        self.clear()
        for bucket in self.buckets:
            bucket.forget()

    def clear(self) -> None:
        self.in_range = True
        self._touched.clear()  # a place that was not touched yet is overwritten, not added to

    def expect(self, post: Post | None) -> None:
        self._open, self._post, self._next = True, post, 0
        self._seen.clear()
        self._waiting = [0] * len(self.buckets)
        for index, _ in self._places.values():
            self._waiting[index] += 1

    def ready(self) -> None:
        pass  # out of place, nothing is ever rewound

    def collect(self) -> None:
        for parameter in self._parameters:  # gradients that came without autograd's hooks
            if parameter.grad is not None:
                self._take(parameter)
        if self._post is not None:  # buckets with parameters that this microbatch did not use
            self._post_up_to(len(self.buckets))
        self._open, self._post = False, None

    def post_all(self, post: Post) -> None:
        self._post, self._next = post, 0
        self._post_up_to(len(self.buckets))
        self._post = None

    def rewind(self, overlapped: bool) -> None:
        for bucket in self.buckets:
            bucket.rewind()

    def install(self, weight: float, shrink: float) -> None:
        means = [self.sum.mean(bucket.result, weight, shrink) for bucket in self.buckets]
        for parameter, (index, place) in self._places.items():
            view = means[index].as_strided(place.shape, place.stride(), place.storage_offset())
            parameter.grad = as_gradient(parameter, view)

    def release(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _take(self, parameter: torch.nn.Parameter) -> None:
        if not self._open or parameter.grad is None:
            return
        index, place = self._places[parameter]
        if self._post is not None and index < self._next:
            raise RuntimeError(
                "a parameter got a second gradient in one backward, after its bucket was handed to the reduction; "
                "with activation checkpointing of shared weights use use_reentrant=False"
            )
        gradient = local_part(parameter.grad)
        self.in_range &= self.sum.add(place, gradient, first=parameter not in self._touched)
        self._touched.add(parameter)
        parameter.grad = None
        if self._post is not None and parameter not in self._seen:
            self._seen.add(parameter)
            self._waiting[index] -= 1
            ready = self._next
            while ready < len(self.buckets) and not self._waiting[ready]:
                ready += 1
            self._post_up_to(ready)

    def _post_up_to(self, end: int) -> None:
        assert self._post is not None
        while self._next < end:
            index, self._next = self._next, self._next + 1
            for parameter, (where, place) in self._places.items():
                if where == index and parameter not in self._touched:
                    place.zero_()
                    self._touched.add(parameter)
            self._post(index, self.buckets[index])


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that lives here; a plain tensor is its own."""
    return getattr(tensor, "_local_tensor", tensor)


def as_gradient(parameter: torch.nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """`value` as the gradient of `parameter`: in its dtype, and sharded as it is."""
    value = value.to(local_part(parameter).dtype)
    if not hasattr(parameter, "_local_tensor"):
        return value
    from torch.distributed.tensor import DTensor

    sharded: DTensor = parameter  # type: ignore[assignment]
    return DTensor.from_local(  # shape and stride: shards may be of unequal size
        value,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
