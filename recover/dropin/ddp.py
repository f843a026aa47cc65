"""The user's own DistributedDataParallel under `recover.Step`: its buckets are reduced in place,
with snapshots.

    recover.dropin.init_replica_world(world)          # DDP's own collectives stay inside the replica
    model = DistributedDataParallel(net)
    step = recover.Step(world, model, optimizer, global_batch=256, gradients=recover.dropin.DDPGradients(model))

DDP reduces into the memory in which gradients are accumulated, so a bucket is copied before it is
reduced and, after a death, restored from the copy: at once ("blocking"), or in parallel to the
forward pass of the next microbatch ("non-blocking": on a side stream on a GPU, in a thread on a
CPU). "auto" follows the policy.

The step decides when DDP posts its buckets: in the last microbatch that this replica owes, which
a death changes. So the model's own `no_sync()` has no effect. Buckets that DDP does not post
(its forward ran without synchronisation, or not through DDP) are read from `p.grad`.
"""

# No postponed annotations here: DDP reads the annotations of the hook.

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from recover.gradients.accumulation import ignore
from recover.gradients.buckets import Bucket
from recover.gradients.deferred import DeviceValue
from recover.gradients.ledger import with_slots
from recover.gradients.module_gradients import NO_SLOTS, Post
from recover.gradients.norm import squared_norms
from recover.gradients.parts import is_dense
from recover.gradients.reduction import FastSum, Sum
from recover.launch.init import init
from recover.policy import SlotSet
from recover.world.carriers.worker import Completion, Work, Worker

Restore = Literal["auto", "blocking", "non-blocking"]


class _DDPBucket:
    """A bucket of DDP: its flat memory, and the positions of the gradients in it."""

    def __init__(self, flat: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        self.bucket = Bucket(flat, in_place=True)
        self.parameters = parameters
        # DDP, too, gives gradients the memory order of their parameters, unless these have gaps.
        self._strides = [
            p.stride() if is_dense(p) else torch.empty(p.shape, device="meta").stride() for p in parameters
        ]

    def write_gradients(self, flat: torch.Tensor) -> None:
        """Copy `flat` to `p.grad`, where DDP keeps it apart from its buckets."""
        for parameter, part in self._parts(flat):
            if parameter.grad is None:
                parameter.grad = part.clone()
            elif parameter.grad.data_ptr() != part.data_ptr():
                parameter.grad.copy_(part)

    def read_gradients(self) -> None:
        """Copy `p.grad` to the bucket, where DDP keeps it apart."""
        for parameter, part in self._parts(self.bucket.local):
            if parameter.grad is None:
                part.zero_()
            elif parameter.grad.data_ptr() != part.data_ptr():
                part.copy_(parameter.grad)

    def _parts(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        at = flat.storage_offset()
        for parameter, stride in zip(self.parameters, self._strides, strict=True):
            yield parameter, flat.as_strided(parameter.shape, stride, at)
            at += parameter.numel()


class DDPGradients:
    """The gradients of a DDP-wrapped model, for `recover.Step(..., gradients=...)`."""

    have_arrived = False  # DDP itself refuses a second backward

    def __init__(self, model: DistributedDataParallel, restore: Restore = "auto") -> None:
        if restore not in ("auto", "blocking", "non-blocking"):
            raise ValueError(f"restore={restore!r} is not known; choose 'auto', 'blocking' or 'non-blocking'")
        if model.process_group.size() != 1:
            raise ValueError(
                f"this DDP model spans {model.process_group.size()} ranks: its own collectives (of buffers, for "
                "rebuilding buckets) would break when one dies; call recover.dropin.init_replica_world(world) "
                "before wrapping it"
            )
        if model.static_graph:
            raise ValueError(
                "this DDP model has static_graph=True, with which its first backward hands all buckets over under one "
                "number, so that they would be mistaken for one another; leave static_graph out"
            )
        self.sum: Sum = FastSum()
        self.largest = np.zeros(0)
        self.unread: tuple[DeviceValue[Any], ...] = ()
        self._model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._used: set[torch.nn.Parameter] = set()
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._used.add)
        self._restore_mode = restore
        self._mine: list[_DDPBucket] = []
        self._fresh = 0  # number of buckets that this backward has posted
        self._post: Post | None = None
        # Slots in `p.grad` now, and after the microbatch in progress.
        self._held = self._after = NO_SLOTS
        self._rewinding: Work | torch.cuda.Event | None = None
        self._helper = Worker()
        self.rewinds = {"blocking": 0, "non-blocking": 0}
        # DDP rebuilds its buckets once, at the first forward after a reduction. A survivor without
        # an extra microbatch would not reach it, and keep another layout than the others: rebuild
        # now, on all replicas alike.
        model.reducer._push_all_rebuilt_params()
        model.reducer._rebuild_buckets()
        self._refuse_ignored()
        model.register_comm_hook(self, ddp_comm_hook)
        ignore(model, "no_sync")
        # DDP has one rank; the step keeps buffers equal between replicas.
        model.broadcast_buffers = False

    def _refuse_ignored(self) -> None:
        """Raise for parameters that DDP leaves out of its buckets: they would not be summed."""
        summed = {
            p for bucket in self._model.reducer._get_zeros_like_grad_buckets() for p in bucket.parameters()
        }
        if ignored := [n for n, p in self._model.named_parameters() if p.requires_grad and p not in summed]:
            raise ValueError(
                f"DDP leaves {len(ignored)} trainable parameter(s) out of its buckets (the first is {ignored[0]}); "
                "leave out delay_all_reduce_named_params and _ddp_params_and_buffers_to_ignore, or give Step the plain "
                "module"
            )

    @property
    def buckets(self) -> list[Bucket]:
        return [each.bucket for each in self._mine]

    @property
    def usage(self) -> list[float]:
        return [float(parameter in self._used) for parameter in self.parameters]

    def squared_norms(self) -> list[float]:
        return squared_norms(self.buckets)

    def lay_out(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        raise ValueError(
            "parameters were frozen or unfrozen, and DDP's buckets are made for those that it was wrapped with; give "
            "Step the plain module instead of DDP, or wrap it again, with a new DDPGradients and a new Step"
        )

    def begin(self) -> None:
        self.clear()
        for each in self._mine:
            each.bucket.forget()

    def clear(self) -> None:
        self.ready()
        self._used.clear()
        self._post, self._held = None, NO_SLOTS
        self.release()

    def expect(self, post: Post | None, slots: SlotSet = NO_SLOTS, in_round: bool = False) -> None:
        self._post, self._fresh = post, 0
        self._after = with_slots(self._held, slots)
        self._model.require_backward_grad_sync = post is not None  # what DDP's no_sync() sets

    def ready(self) -> None:
        if isinstance(self._rewinding, torch.cuda.Event):
            torch.cuda.current_stream().wait_event(self._rewinding)
        elif self._rewinding is not None and not self._rewinding.wait():
            raise RuntimeError(f"gradients could not be restored: {self._rewinding.error}")
        self._rewinding = None

    def collect(self) -> None:
        self._held = self._after
        if self._post is not None:
            self._post_from(self._fresh, self._post)
        self._post = None

    def post_all(self, post: Post) -> None:
        self.ready()
        self._post_from(0, post)

    def take(self, index: int, flat: torch.Tensor, parameters: list[torch.Tensor]) -> bool:
        """Post a full bucket, for DDP's hook. False if it is not due yet, and stays unchanged."""
        if self._post is None:
            return False
        known = self._mine[index] if index < len(self._mine) else None
        if known is None or known.bucket.local.data_ptr() != flat.data_ptr():
            same = known is not None and [*map(id, known.parameters)] == [*map(id, parameters)]
            self._mine[index : index + 1 if same else None] = [_DDPBucket(flat, parameters)]
        self._fresh = index + 1
        self._mine[index].bucket.held = self._after
        self._post(index, self._mine[index].bucket)
        return True

    def _post_from(self, first: int, post: Post) -> None:
        """Post the buckets that DDP has not posted, from `p.grad`, which holds the whole local
        sum."""
        if sum(len(each.parameters) for each in self._mine) < len(self.parameters):
            unknown = self._model.reducer._get_zeros_like_grad_buckets()[len(self._mine) :]
            self._mine += [_DDPBucket(each.buffer(), each.parameters()) for each in unknown]
        for index, each in list(enumerate(self._mine))[first:]:
            each.read_gradients()
            each.bucket.held = self._held
            post(index, each.bucket)

    def rewind(self, overlapped: bool) -> None:
        self.ready()
        if self._restore_mode != "auto":
            overlapped = self._restore_mode == "non-blocking"
        self.rewinds["non-blocking" if overlapped else "blocking"] += 1
        if not overlapped:
            self._rewind()
        elif self.parameters[0].is_cuda:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._rewind()
            self._rewinding = stream.record_event()
        else:
            self._rewinding = self._helper.post(self._rewind)

    def install(self, weight: float, factors: Sequence[float], used: Sequence[bool]) -> None:
        for each in self._mine:
            self.sum.mean(each.bucket.result, (), (), weight, factors[0])
            each.write_gradients(each.bucket.result)
        for parameter, anybody in zip(self.parameters, used, strict=True):
            if not anybody:
                parameter.grad = None

    def release(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _rewind(self) -> None:
        for each in self._mine:
            if each.bucket.posted is not None:  # otherwise it was not reduced, and `p.grad` is right
                each.bucket.rewind()
                each.write_gradients(each.bucket.local)


def ddp_comm_hook(state: DDPGradients, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook: the reduction runs on the communication thread, and never raises
    inside backward."""
    flat = bucket.buffer()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[flat.device] if flat.is_cuda else None
    )
    if not state.take(bucket.index(), flat, bucket.parameters()):
        future.set_result(flat)
        return future
    # The future is completed after the reduction, wherever that runs: the threads keep the order.
    init().worker.post(lambda: Completion(lambda: future.set_result(flat)))
    return future
