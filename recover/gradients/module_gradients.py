"""Gradients of a module, moved out of `p.grad` into flat buckets as backward produces them.

A gradient is taken as soon as autograd has finished it, added to its slice of a bucket (mostly
fp32), and freed. The host adds each one at once, while it is in the cache. On a GPU all gradients
of a bucket are added together: launching a kernel for each takes longer than the addition.

During the last microbatch of an attempt a bucket is reduced as soon as it is full, while backward
continues. Buckets are always posted in the same order, in whatever order autograd finishes them:
the reductions of all replicas must match.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch

from recover.gradients import deferred
from recover.gradients.borrowed import BorrowedGradients
from recover.gradients.bucket_layout import BucketSlice, ModuleBucket, cut, room_for
from recover.gradients.buckets import Bucket
from recover.gradients.deferred import DeviceValue, Numbers
from recover.gradients.extremes import Extremes
from recover.gradients.grad_hooks import GradHooks
from recover.gradients.gradient_hash import GradientHash
from recover.gradients.ledger import with_slots
from recover.gradients.norm import squared_norms
from recover.gradients.parts import as_real
from recover.gradients.reduction import FastSum, Sum
from recover.gradients.replica_interface import PLAIN, Replica, Sharing
from recover.gradients.word_checksum import LOW, WordChecksum, are_whole
from recover.policy import SlotSet

Post = Callable[[int, Bucket], None]
MEGABYTE = 1 << 20
BUCKET_MB = 25.0
BUCKET_MB_OF_DEVICE = 50.0  # each reduction has to wait for its turn on the device
NO_SLOTS = SlotSet()


class Gradients(Protocol):
    """The source of a step's buckets."""

    sum: Sum
    parameters: list[torch.nn.Parameter]  # with slices in the buckets

    @property
    def have_arrived(self) -> bool:
        """Whether any gradient has arrived since the last `expect`."""

    @property
    def usage(self) -> list[float]:
        """For each parameter: 1 if a microbatch in the local sums has used it, else 0."""

    @property
    def unread(self) -> Sequence[DeviceValue[Any]]:
        """Values that `usage` and `largest` read from a device, to be fetched with others."""

    def squared_norms(self) -> list[float]:
        """This rank's part of the squared norm of the reduced sums, for each part of the gradient
        that is clipped by itself. Values that several ranks hold count once.

        Waits for the reductions; 0 if one of them has failed.
        """

    def lay_out(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Create buckets for the parameters that require a gradient now."""

    @property
    def buckets(self) -> list[Bucket]: ...

    @property
    def largest(self) -> Numbers:
        """The largest magnitude in the gradients of exact local sums, by the number of their
        exponent; infinity where one is not finite."""

    def begin(self) -> None:
        """Begin a step with empty local sums, also after a step that was left early."""

    def clear(self) -> None:
        """Drop the local sums of this step."""

    def expect(self, post: Post | None, slots: SlotSet = NO_SLOTS, in_round: bool = False) -> None:
        """Before a microbatch (or a round), which adds `slots` to the buckets.

        `post` is given for the last one of an attempt: full buckets are posted.
        """

    def ready(self) -> None:
        """Before backward: wait for a rewind that runs in parallel to the forward pass."""

    def collect(self) -> None:
        """After backward: complete the local sums, and post them if it was the last one."""

    def post_all(self, post: Post) -> None:
        """Post every bucket unchanged: no microbatch is left to run."""

    def rewind(self, overlapped: bool) -> None:
        """Restore the local sums after a failed reduction; `overlapped`: it may run in parallel to
        the microbatches that follow."""

    def install(self, weight: float, factors: Sequence[float], used: Sequence[bool]) -> None:
        """Give the optimizer the mean gradients: the sums divided by `weight`, then clipped, each
        part by its factor.

        Parameters that no replica has `used` get None, as they would in one process: an
        optimizer leaves those alone.
        """

    def release(self) -> None:
        """After the optimizer: take the gradients back."""


class OwnedGradients:
    """Buckets for the parameters of a module, filled by hooks that run when a parameter's gradient
    is complete.

    Parameters that several ranks of the replica hold together (see `Sharing`) have buckets of
    their own. A hook must not wait for other ranks, since each of them may be elsewhere in its
    pipeline. So their parts are gathered in a tray, and added up over the partners after the
    round: a local sum never holds half a gradient.
    """

    has_hooks = True  # otherwise gradients are taken after a backward pass

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        bucket_mb: float | None,
        sum: Sum | None = None,
        replica: Replica = PLAIN,
        names: Callable[[], Mapping[torch.nn.Parameter, str]] = dict,
        parts: int = 1,
        part_of: Callable[[], Mapping[torch.nn.Parameter, int]] = dict,
        with_checksums: bool = False,
    ) -> None:
        """`names`: of the parameters, for messages and exponents; `parts`: number of parts of the
        gradient, each with a norm of its own; `part_of`: the part that each parameter belongs to, 0 for
        parameters that it leaves out; `with_checksums`: keep a checksum of all words that an exact sum
        adds."""
        self.sum: Sum = sum or FastSum()
        self._extremes = Extremes()
        self._bucket_mb, self._replica, self._names = bucket_mb, replica, names
        self._parts, self._part_of = parts, part_of
        self._hooks = GradHooks([], self._take, self._take_bucket)
        self._borrowed: BorrowedGradients | None = None  # by the optimizer, until `release`
        self._gives_copies = False
        self._after = NO_SLOTS  # the slots that a bucket holds after the microbatch in progress
        self._open = False  # a microbatch is in progress: gradients are taken
        self._in_round = False  # what is in progress are the microbatches of a round
        self._hash: GradientHash | None = None  # of the microbatch in progress, if it is verified
        self._counts = True  # its gradients enter the local sums
        self._words = WordChecksum() if with_checksums and self.sum.exact else None  # in the local sums
        self._post: Post | None = None
        self._next = 0  # the next bucket to post
        # Slices with a gradient before the last pass of a microbatch, and those of them that got none in it.
        self._early, self._complete_early = set[BucketSlice](), set[BucketSlice]()
        self.lay_out(parameters)

    def lay_out(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        everything = list(parameters)
        self.parameters = [p for p in everything if p.requires_grad]
        self._frozen = [p for p in everything if not p.requires_grad]
        if not self.parameters:
            raise ValueError("the model has no parameter that requires a gradient; there is nothing to train")
        self._known = self._names()
        self._kinds = self._name_exponents(everything)
        self._filled = self._lay_out(self._bucket_mb, self._replica)
        self.buckets = [each.bucket for each in self._filled]
        by_parameter = {place.parameter: place for each in self._filled for place in each.slices}
        self._slices = [by_parameter[parameter] for parameter in self.parameters]
        self._complete_early = set()
        self._hooks.remove()
        hooked = [each.slices for each in self._filled] if self.has_hooks else []
        self._hooks = GradHooks(hooked, self._take, self._take_bucket)

    def _name(self, parameter: torch.nn.Parameter) -> str:
        return self._known.get(parameter, f"one of shape {tuple(parameter.shape)}")

    def _name_exponents(self, parameters: Sequence[torch.nn.Parameter]) -> dict[torch.nn.Parameter, int]:
        """Give each parameter, also a frozen one, an exponent under its name. Returns their numbers;
        none for a fast sum."""
        exponents = self.sum.exponents
        if exponents is None:
            return {}
        names = [self._known.get(parameter, str(number)) for number, parameter in enumerate(parameters)]
        exponents.name("parameters", self._replica.names_of_all(names))
        numbers = exponents.index_of("parameters")
        return {parameter: numbers[name] for parameter, name in zip(parameters, names, strict=True)}

    @property
    def usage(self) -> list[float]:
        used: set[BucketSlice] = set()
        for each in self._filled:
            used |= each.used
            if each.used_by_partners is not None:
                used |= each.used_by_partners.value
        return [float(place in used) for place in self._slices]

    @property
    def largest(self) -> Numbers:
        largest = self._extremes.largest.value.copy()
        for each in self._filled:
            if each.parts > 1:  # as many gradients of this size may be added up to one
                counted = [kind for kind in each.kinds if kind < len(largest)]
                largest[counted] *= each.parts
        return largest

    @property
    def unread(self) -> list[DeviceValue[Any]]:
        shared = (each.used_by_partners for each in self._filled)
        return [self._extremes.largest, *(value for value in shared if value is not None)]

    @property
    def checksum_added(self) -> DeviceValue[int]:
        """The checksum of all words that were added to the local sums of this step."""
        assert self._words is not None
        return self._words.value()

    def checksum_of(self, which: Literal["local", "result"]) -> int | None:
        """The checksum of the local sums, or of the reduced ones; None if they hold a number that is
        no integer."""
        words = [getattr(each.bucket, which) for each in self._filled]
        sums = [each.checksum_of(some).value() for each, some in zip(self._filled, words, strict=True)]
        whole = DeviceValue(lambda *found: all(each.all() for each in found), *map(are_whole, words))
        deferred.fetch([whole, *sums])
        return builtins.sum(each.value for each in sums) & LOW if whole.value else None

    def squared_norms(self) -> list[float]:
        slices = [(each.sizes, self.sum.units(each.kinds)) for each in self._filled] if self.sum.exact else ()
        return squared_norms(self.buckets, self._parts, slices)

    def _lay_out(self, bucket_mb: float | None, replica: Replica) -> list[ModuleBucket]:
        """Last parameters first, as backward meets them. A bucket mixes neither devices, types, ways
        of sharing nor parts that are clipped by themselves.

        Parameters that partners share come last, since their buckets are full last. These
        buckets are cut alike on all partners, whatever else they hold: their sums have the same
        bits only if they are reduced in the same pieces.
        """
        alike: dict[tuple[torch.device, torch.dtype, Sharing, int], list[torch.nn.Parameter]] = {}
        part_of = self._part_of()
        for parameter in reversed(self.parameters):
            dtype, part = self.sum.dtype_for(parameter.dtype), part_of.get(parameter, 0)
            alike.setdefault((parameter.device, dtype, replica.sharing(parameter), part), []).append(
                parameter
            )
        filled: list[ModuleBucket] = []
        for (device, dtype, sharing, part), members in sorted(
            # Partners reduce their buckets in one order, in whatever order each of them holds the
            # parameters.
            alike.items(),
            key=lambda item: (False, 0) if item[0][2].partners is None else (True, item[0][3]),
        ):
            near = device.type in deferred.NEAR
            limit = max(1, int((bucket_mb or (BUCKET_MB if near else BUCKET_MB_OF_DEVICE)) * MEGABYTE / 4))
            for group in cut(members, limit):
                total = builtins.sum(room_for(p).numel() for p in group)
                local = torch.zeros(total, dtype=dtype, device=device)
                filled.append(
                    ModuleBucket(
                        len(filled),
                        Bucket(local, copies=sharing.copies, part=part),
                        group,
                        [self._kinds.get(parameter, 0) for parameter in group],
                        sharing.partners,
                        not near,
                    )
                )
        return filled

    def begin(self) -> None:
        self.clear()
        for bucket in self.buckets:
            bucket.forget()

    def clear(self) -> None:
        self._extremes.clear()
        self._open, self._post = False, None
        self._hash, self._counts = None, True
        if self._words is not None:
            self._words.clear()
        for each in self._filled:
            each.clear()
        for bucket in self.buckets:
            bucket.held = NO_SLOTS

    @property
    def have_arrived(self) -> bool:
        seen = any(each.seen for each in self._filled)
        return seen or any(parameter.grad is not None for parameter in self.parameters)

    def check(self, counts: bool) -> GradientHash:
        """Before `expect`: the microbatch is verified. Returns the fingerprint of its gradients,
        which is complete after `collect`. `counts`: they enter the local sums, too."""
        self._hash, self._counts = GradientHash(self._name), counts
        return self._hash

    def expect(self, post: Post | None, slots: SlotSet = NO_SLOTS, in_round: bool = False) -> None:
        self._open, self._post, self._next, self._early = True, post, 0, set()
        self._in_round = in_round
        self._after = with_slots(self.buckets[0].held, slots)
        for each in self._filled:
            each.seen.clear()
        # With one hook for each parameter, a gradient that comes in several pieces comes in the same
        # ones on all replicas: fingerprints of other pieces would differ.
        self._hooks.expect(each=in_round or self.sum.exact or self._hash is not None)

    def pause(self) -> None:
        """Take no gradient until the next `expect`."""
        self._open, self._post = False, None

    def expect_last_pass(self, post: Post | None, slots: SlotSet) -> None:
        """Before the last backward pass of a microbatch, which may have left gradients in `.grad` before.

        A loss that goes back chunk by chunk has completed the gradients of its head by now, and the body
        follows. A fast sum takes those at once that got no more in the last pass of an earlier
        microbatch, so that their buckets do not keep the others waiting. An exact sum takes each gradient
        once, when it is complete, and so does a fingerprint: a gradient that is rounded in two pieces has
        other bits.
        """
        self.expect(post, slots)
        self._early = {place for place in self._slices if place.parameter.grad is not None}
        if not self.sum.exact and self._hash is None:
            for place in self._early & self._complete_early:
                self._take(place, place.parameter)

    def ready(self) -> None:
        pass  # reductions are out of place: nothing is ever rewound

    def collect(self) -> None:
        for place in self._slices:  # gradients without a hook
            if place.parameter.grad is not None:
                if place in self._early:
                    self._complete_early.add(place)
                self._hooks.came_otherwise(place.index)
                self._take(place, place.parameter)
        for each in self._filled:  # buckets of which this microbatch did not use all parameters
            self._add_taken(each)
        if strays := [self._name(p) for p in self._frozen if p.requires_grad and p.grad is not None]:
            raise RuntimeError(
                f"parameter {strays[0]} was frozen when the step began, and has got a gradient in it; call "
                "requires_grad_() between two steps, the same on all replicas"
            )
        self._extremes.fold(self._in_round)
        self._hash, counts, self._counts = None, self._counts, True
        if not counts:
            self._open, self._post = False, None
            return
        # All ranks of the replica do this after each round: `partners.add_up` is a collective.
        for each in self._filled:
            each.add_up_tray(self._words)
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

    def install(self, weight: float, factors: Sequence[float], used: Sequence[bool]) -> None:
        means = [
            each.keep_if_in_result(
                self.sum.mean(each.bucket.result, each.kinds, each.sizes, weight, factors[each.bucket.part])
            )
            for each in self._filled
        ]
        self._borrowed = None if self._gives_copies else BorrowedGradients(self._filled)
        for place, anybody in zip(self._slices, used, strict=True):
            if anybody:
                mean = means[place.index]
                gradient = place.gradient_in(mean, mean is self._filled[place.index].mean_in_result)
                place.parameter.grad = gradient.clone() if self._gives_copies else gradient

    def release(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        for bucket in self._borrowed.kept() if self._borrowed else ():
            bucket.give_away()
            self._gives_copies = True  # in all steps that follow
        self._borrowed = None

    def _take(self, place: BucketSlice, parameter: torch.nn.Parameter) -> None:
        """Take the gradient of one parameter, which is complete."""
        if parameter.grad is None or not self._open:
            return
        each = self._filled[place.index]
        if place in each.taken:
            self._add_taken(each)  # the second gradient of this parameter
        self._set_aside(each, [place])
        if not each.adds_together:
            self._add_taken(each)
        elif len(each.taken) == len(each.slices):
            self._hooks.came_last(place)
            self._add_taken(each)
        self._post_full()

    def _take_bucket(self, index: int, _last: torch.nn.Parameter) -> None:
        """The parameter whose gradient came last so far is complete: take all gradients of its
        bucket."""
        if self._open:
            each = self._filled[index]
            self._set_aside(each, [place for place in each.slices if place.parameter.grad is not None])
            self._add_taken(each)
            self._post_full()

    def _set_aside(self, each: ModuleBucket, places: Sequence[BucketSlice]) -> None:
        """Move these gradients of one bucket out of `p.grad`."""
        if places and self._post is not None and each.index < self._next:
            raise RuntimeError(
                "a parameter got a second gradient in one backward, after its bucket was handed to the reduction; "
                "with activation checkpointing of shared weights use use_reentrant=False, and with step.own_backward "
                "call record(loss) without before_last_pass"
            )
        each.take(places)

    def _post_full(self) -> None:
        """Post full buckets in their order. A tray is full only after the round."""
        if self._post is None:
            return
        ready = self._next
        while ready < len(self._filled) and self._filled[ready].is_full and not self._filled[ready].has_tray:
            ready += 1
        self._post_up_to(ready)

    def _add_taken(self, each: ModuleBucket) -> None:
        """Add the gradients that were taken for this bucket to its sum. The first one of a slice
        overwrites it."""
        taken = each.taken
        if not taken:
            return
        if self._hash is not None:
            for place, gradient in taken.items():
                self._hash.add(place.parameter, self._dense(place, gradient))
            if not self._counts:
                taken.clear()
                return
        known = each.touched.intersection(taken)
        for first, some in ((True, len(taken) - len(known)), (False, len(known))):
            if some:
                all_alike = some == len(taken)  # mostly
                these = taken if all_alike else {p: taken[p] for p in taken if (p not in known) is first}
                gradients = [self._dense(place, gradient) for place, gradient in these.items()]
                kinds, rooms = [place.kind for place in these], [place.room for place in these]
                checksum = each.checksum_for(self._words)
                self._extremes.note(self.sum.add(kinds, rooms, gradients, first, checksum))
        each.touched.update(taken)
        each.used.update(taken)
        taken.clear()

    def _dense(self, place: BucketSlice, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of parameter {self._name(place.parameter)} is sparse, and buckets are dense; "
                "use sparse=False, and no other operation with sparse gradients"
            )
        return gradient if gradient.dtype is torch.float32 else as_real(gradient)

    def _post_up_to(self, end: int) -> None:
        """Buckets are posted in the order of their numbers on all replicas: the reductions must
        match."""
        assert self._post is not None
        while self._next < end:
            index, self._next = self._next, self._next + 1
            each = self._filled[index]
            self._add_taken(each)
            each.complete_sum()
            if self._open:  # of the microbatch in progress, this bucket has all that it will get
                each.bucket.held = self._after
            self._post(index, each.bucket)
