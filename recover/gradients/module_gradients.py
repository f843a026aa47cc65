"""The gradients of a plain module: moved out of `p.grad` into buckets of our own as backward produces them.

Each parameter's gradient is taken the moment autograd has finished it, and added to its place in a flat bucket (of fp32
mostly), and freed. The host does that at once, while the gradient is in its cache. A GPU is told of all gradients of a
bucket together, when they are complete: to be told of each takes longer than to add it.

During the last microbatch of an attempt a bucket is reduced as soon as it is full, while backward goes on. Buckets are
always posted in the same order, whatever order autograd finishes them in: the replicas must match.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from recover.gradients import deferred
from recover.gradients.borrowed import Lent
from recover.gradients.bucket_layout import Place, cut, marked, room_for
from recover.gradients.buckets import Bucket
from recover.gradients.deferred import Later
from recover.gradients.extremes import Extremes
from recover.gradients.grad_hooks import Tellers
from recover.gradients.ledger import with_slots
from recover.gradients.norm import squared_norm
from recover.gradients.parts import as_real, on_device, own_gradient
from recover.gradients.reduction import FastSum, Sum
from recover.gradients.replica_interface import PLAIN, Partners, Replica, Sharing
from recover.policy import SlotSet

Post = Callable[[int, Bucket], None]
MEGABYTE = 1 << 20
BUCKET_MB = 25.0
BUCKET_MB_OF_DEVICE = 50.0  # each reduction has to wait for its turn on the device
NO_SLOTS = SlotSet()


class Gradients(Protocol):
    """Where a step's buckets come from."""

    sum: Sum
    parameters: list[torch.nn.Parameter]  # those that the buckets are for

    @property
    def came(self) -> bool:
        """Whether any gradient has, since the last `expect`."""

    @property
    def usage(self) -> list[float]:
        """For each of the parameters: 1 if anything in the local sums has used it, else 0."""

    @property
    def unread(self) -> Sequence[Later[Any]]:
        """What `usage` and `largest` will read of a device, so that it can be read together with other things."""

    def squared_norm(self) -> float:
        """Of the reduced sums, in their own unit: this rank's part of it, what others hold too counted once.

        Waits for them; 0 if one of them has failed.
        """

    def lay_out(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Some were frozen or unfrozen: make buckets for those that require a gradient now."""

    @property
    def buckets(self) -> list[Bucket]: ...

    @property
    def largest(self) -> float:
        """The largest magnitude in any gradient of the local sums, if they are exact; infinity if one is not finite."""

    def begin(self) -> None:
        """A new step: the local sums are empty, whatever an earlier one that was left early had begun."""

    def clear(self) -> None:
        """Give up what this replica has summed in this step."""

    def expect(self, post: Post | None, slots: SlotSet = NO_SLOTS, in_round: bool = False) -> None:
        """A microbatch (or a round) is about to run: `slots` is what the buckets hold more of when it is through.

        If `post` is given it is the last one, and full buckets are posted.
        """

    def ready(self) -> None:
        """Its backward is about to run: a rewind that was left running beside the forward pass must have ended."""

    def collect(self) -> None:
        """Its backward is through: all of it is in the local sums, and if it was the last, posted."""

    def post_all(self, post: Post) -> None:
        """Post every bucket as it is: there was nothing (more) to run."""

    def rewind(self, overlapped: bool) -> None:
        """Make the local sums what they were; `overlapped`: microbatches follow that it may run beside."""

    def install(self, weight: float, shrink: float, used: Sequence[bool]) -> None:
        """Give the optimizer the mean gradients: the sums divided by `weight`, then shrunk by clipping.

        Parameters that no replica has `used` get None, as they would in one process: an optimizer leaves those alone.
        """

    def release(self) -> None:
        """The optimizer is through with them."""


class OwnedGradients:
    """Buckets for the parameters of a module, filled by hooks that run when a parameter's gradient is complete.

    What several ranks of the replica hold together (see `Sharing`) lies in buckets of its own. A hook must not wait
    for other ranks, since each of them may be elsewhere in its pipeline. So the parts are gathered in a tray, and added
    up over the partners when the round is through: a local sum never holds half a gradient.
    """

    told_by_autograd = True  # otherwise gradients are taken when a backward is through

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        bucket_mb: float | None,
        sum: Sum | None = None,
        replica: Replica = PLAIN,
        name: Callable[[torch.nn.Parameter], str] = lambda parameter: (
            f"one of shape {tuple(parameter.shape)}"
        ),
    ) -> None:
        self.sum: Sum = sum or FastSum()
        self._extremes = Extremes()
        self._told: dict[int, Later[set[Place]]] = {}  # by bucket, what its partners have used
        self._bucket_mb, self._replica, self._name = bucket_mb, replica, name
        self._tellers = Tellers([], self._take, self._take_bucket)
        self._used: set[Place] = set()
        self._lent: Lent | None = None  # to the optimizer: memory that the next step sums into
        self._gives_copies = False
        self._after = NO_SLOTS  # what a bucket holds that the microbatch under way has filled
        self._emptied: set[int] = set()  # buckets whose trays have been added to their local sums
        self.lay_out(parameters)
        self._touched: set[Place] = set()
        self._open = False
        self._post: Post | None = None
        self._next = 0  # the next bucket to post
        self._seen: set[Place] = set()  # of the microbatch under way
        self._missing: list[int] = []  # by bucket, how many were not seen yet

    def lay_out(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        everything = list(parameters)
        self.parameters = [p for p in everything if p.requires_grad]
        self._frozen = [p for p in everything if not p.requires_grad]
        if not self.parameters:
            raise ValueError("the model has no parameter that requires a gradient; there is nothing to train")
        self._members: list[list[Place]] = []  # by bucket
        self._taken: list[dict[Place, torch.Tensor]] = []  # by bucket, gradients that are not in its sum yet
        self._together: list[bool] = []  # by bucket, whether its gradients are
        self._trays: dict[int, tuple[Partners, torch.Tensor]] = {}  # by bucket
        self.buckets = self._lay_out(self._bucket_mb, self._replica)
        by_parameter = {place.parameter: place for members in self._members for place in members}
        self._places = [by_parameter[parameter] for parameter in self.parameters]
        self._tellers.remove()
        told_of = self._members if self.told_by_autograd else []
        self._tellers = Tellers(told_of, self._take, self._take_bucket)

    @property
    def usage(self) -> list[float]:
        used = self._used.union(*(told.value for told in self._told.values()))
        return [float(place in used) for place in self._places]

    @property
    def largest(self) -> float:
        return self._extremes.largest.value

    @property
    def unread(self) -> list[Later[Any]]:
        return [self._extremes.largest, *self._told.values()]

    def squared_norm(self) -> float:
        return squared_norm(self.buckets)

    def _lay_out(self, bucket_mb: float | None, replica: Replica) -> list[Bucket]:
        """Last parameters first, as backward meets them. A bucket mixes neither devices, types nor ways of sharing.

        What partners share comes last, since it is full last. Its buckets are cut alike on all of them, whatever else
        they hold: their sums have the same bits only if they are reduced in the same pieces.
        """
        alike: dict[tuple[torch.device, torch.dtype, Sharing], list[torch.nn.Parameter]] = {}
        for parameter in reversed(self.parameters):
            kind = parameter.device, self.sum.dtype_for(parameter.dtype), replica.sharing(parameter)
            alike.setdefault(kind, []).append(parameter)
        buckets: list[Bucket] = []
        for (device, dtype, sharing), members in sorted(
            alike.items(), key=lambda item: item[0][2].partners is not None
        ):
            near = device.type in deferred.NEAR
            limit = max(1, int((bucket_mb or (BUCKET_MB if near else BUCKET_MB_OF_DEVICE)) * MEGABYTE / 4))
            for group in cut(members, limit):
                total = builtins.sum(room_for(p).numel() for p in group)
                local = torch.zeros(total, dtype=dtype, device=device)
                filled = local
                if sharing.partners is not None:
                    filled = local.new_zeros(total + len(group))  # and whether each was used by anybody
                    self._trays[len(buckets)] = sharing.partners, filled
                at, places = 0, []
                for parameter in group:
                    shape, size = room_for(parameter).shape, room_for(parameter).numel()
                    places.append(Place(parameter, len(buckets), filled[at : at + size].view(shape)))
                    at += size
                self._members.append(places)
                self._taken.append({})
                self._together.append(not near)
                buckets.append(Bucket(local, copies=sharing.copies))
        return buckets

    def begin(self) -> None:
        self.clear()
        for bucket in self.buckets:
            bucket.forget()

    def clear(self) -> None:
        self._extremes.clear()
        self._told.clear()
        self._open, self._post = False, None
        self._touched.clear()  # a place that was not touched yet is overwritten, not added to
        self._used.clear()
        self._emptied.clear()
        for taken in self._taken:
            taken.clear()
        for bucket in self.buckets:
            bucket.held = NO_SLOTS

    @property
    def came(self) -> bool:
        return bool(self._seen) or any(parameter.grad is not None for parameter in self.parameters)

    def expect(self, post: Post | None, slots: SlotSet = NO_SLOTS, in_round: bool = False) -> None:
        self._open, self._post, self._next = True, post, 0
        self._after = with_slots(self.buckets[0].held, slots)
        self._seen.clear()
        self._missing = [len(places) for places in self._members]
        self._tellers.expect(each=in_round or self.sum.exact)

    def ready(self) -> None:
        pass  # out of place, nothing is ever rewound

    def collect(self) -> None:
        for place in self._places:  # gradients that nobody told of
            if place.parameter.grad is not None:
                self._tellers.came_otherwise(place.index)
                self._take(place, place.parameter)
        for index in range(len(self.buckets)):  # those of which this microbatch did not use all
            self._add_taken(index)
        if strays := [self._name(p) for p in self._frozen if p.requires_grad and p.grad is not None]:
            raise RuntimeError(
                f"parameter {strays[0]} was frozen when the step began, and has got a gradient in it; call "
                "requires_grad_() between two steps, the same on all replicas"
            )
        self._extremes.fold()
        self._empty_trays()
        if self._post is not None:  # buckets with parameters that this microbatch did not use
            self._post_up_to(len(self.buckets))
        for bucket in self.buckets:
            bucket.held = self._after
        self._open, self._post = False, None

    def post_all(self, post: Post) -> None:
        self._post, self._next = post, 0
        self._post_up_to(len(self.buckets))
        self._post = None

    def rewind(self, overlapped: bool) -> None:
        for bucket in self.buckets:
            bucket.rewind()

    def install(self, weight: float, shrink: float, used: Sequence[bool]) -> None:
        means = [self.sum.mean(bucket.result, weight, shrink) for bucket in self.buckets]
        self._lent = None if self._gives_copies else Lent(self.buckets, self._members)
        for place, anybody in zip(self._places, used, strict=True):
            if anybody:
                gradient = place.gradient_in(means[place.index])
                place.parameter.grad = gradient.clone() if self._gives_copies else gradient

    def release(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        for bucket in self._lent.kept() if self._lent else ():
            bucket.give_away()
            self._gives_copies = True  # from here on
        self._lent = None

    def _take(self, place: Place, parameter: torch.nn.Parameter) -> None:
        """Its gradient is complete."""
        if parameter.grad is None or not self._open:
            return
        index = place.index
        if place in self._taken[index]:
            self._add_taken(index)  # this is its second one
        self._set_aside([place])
        if not self._together[index]:
            self._add_taken(index)
        elif len(self._taken[index]) == len(self._members[index]):
            self._tellers.came_last(place)
            self._add_taken(index)
        self._post_full()

    def _take_bucket(self, index: int, _last: torch.nn.Parameter) -> None:
        """The gradient that was the last of this bucket so far is complete: take all that are there."""
        if self._open:
            self._set_aside([place for place in self._members[index] if place.parameter.grad is not None])
            self._add_taken(index)
            self._post_full()

    def _set_aside(self, places: Sequence[Place]) -> None:
        """Their gradients, all of one bucket."""
        if not places:
            return
        index = places[0].index
        if self._post is not None and index < self._next:
            raise RuntimeError(
                "a parameter got a second gradient in one backward, after its bucket was handed to the reduction; "
                "with activation checkpointing of shared weights use use_reentrant=False"
            )
        taken = self._taken[index]
        for place in places:
            gradient = place.parameter.grad
            taken[place] = gradient if type(gradient) is torch.Tensor else own_gradient(place.parameter)
            place.parameter.grad = None
        before = len(self._seen)
        self._seen.update(places)
        self._missing[index] -= len(self._seen) - before

    def _post_full(self) -> None:
        """In their order. A tray is full when the round is through, and not before."""
        if self._post is None:
            return
        ready = self._next
        while ready < len(self.buckets) and not self._missing[ready] and ready not in self._trays:
            ready += 1
        self._post_up_to(ready)

    def _add_taken(self, index: int) -> None:
        """Add what was taken for this bucket to its places; what comes first to a place overwrites it."""
        taken = self._taken[index]
        if not taken:
            return
        parts = self._trays[index][0].size if index in self._trays else 1
        known = self._touched.intersection(taken)
        for first, some in ((True, len(taken) - len(known)), (False, len(known))):
            if some:
                all_alike = some == len(taken)  # mostly
                these = taken if all_alike else {p: taken[p] for p in taken if (p not in known) is first}
                gradients = [self._dense(place, gradient) for place, gradient in these.items()]
                self._extremes.note(self.sum.add([p.room for p in these], gradients, first), parts)
        self._touched.update(taken)
        self._used.update(taken)
        taken.clear()

    def _dense(self, place: Place, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of parameter {self._name(place.parameter)} is sparse, and buckets are dense; "
                "use sparse=False, and no other operation with sparse gradients"
            )
        return gradient if gradient.dtype is torch.float32 else as_real(gradient)

    def _post_up_to(self, end: int) -> None:
        assert self._post is not None
        while self._next < end:
            index, self._next = self._next, self._next + 1
            self._add_taken(index)
            if index not in self._trays:
                self._fill_up(index)
            elif index not in self._emptied:
                self.buckets[index].local.zero_()
                self._emptied.add(index)
            if self._open:  # of the microbatch under way, this bucket has all that it will get
                self.buckets[index].held = self._after
            self._post(index, self.buckets[index])

    def _fill_up(self, index: int) -> None:
        """Parameters that nobody has used count as zero."""
        for place in self._members[index]:
            if place not in self._touched:
                place.room.zero_()
                self._touched.add(place)

    def _empty_trays(self) -> None:
        """Add up what the round gave to shared parameters. All ranks of the replica do this after each round."""
        for index, (partners, tray) in self._trays.items():
            local = self.buckets[index].local
            self._fill_up(index)
            used = [float(place in self._used) for place in self._members[index]]
            tray[local.numel() :] = on_device(torch.tensor(used, dtype=tray.dtype), tray.device)
            partners.add_up(tray)
            if index in self._emptied:
                local.add_(tray[: local.numel()])
            else:
                local.copy_(tray[: local.numel()])
                self._emptied.add(index)
            self._told[index] = marked(self._members[index], tray[local.numel() :])
            self._touched.difference_update(self._members[index])
