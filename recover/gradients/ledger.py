"""Checks before a commit: the slots in every bucket, and the samples in the sum over all
replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recover.policy import SlotSet

if TYPE_CHECKING:
    from recover.gradients.buckets import Bucket


class LedgerError(RuntimeError):
    """The sums do not hold what was planned: no repair can fix that, and a commit would be
    silently wrong."""


def with_slots(held: SlotSet, more: SlotSet) -> SlotSet:
    """The slots of a local sum after these are added. Raises LedgerError for a slot that it
    holds already."""
    if held & more:
        raise LedgerError(
            f"slots {held & more} are in the local sum already (it holds {held}); run each slot once"
        )
    return held | more


def check_buckets(step: int, buckets: Sequence[Bucket], owed: SlotSet) -> None:
    """Raises LedgerError unless every bucket was posted in this attempt, with exactly the slots
    that this replica owes."""
    if not buckets:
        raise LedgerError(f"step {step}: there is no gradient bucket, so nothing can have been summed")
    for number, bucket in enumerate(buckets):
        if bucket.posted is None:
            wrong = "was not handed to the reduction"
        elif bucket.posted != owed:
            gaps = [("without slots", owed - bucket.posted), ("with slots too many:", bucket.posted - owed)]
            wrong = "was handed to the reduction " + " and ".join(
                f"{how} {some}" for how, some in gaps if some
            )
        else:
            continue
        raise LedgerError(
            f"step {step}: gradient bucket {number} of {len(buckets)} {wrong} (this replica owes slots {owed}); "
            "nothing was committed. Run each microbatch through the model that the step was given, call "
            "step.backward(loss) once for it, and leave accumulation (no_sync and the like) to the step"
        )


def check_grids(step: int, same: bool) -> None:
    """Raises LedgerError unless all replicas have rounded to the same grid."""
    if not same:
        raise LedgerError(
            f"step {step}: replicas have summed with different exponents; nothing was committed. All ranks must run "
            "the same version of recover with the same global_batch and the same model"
        )


def check_samples(step: int, found: int, planned: int) -> None:
    """Raises LedgerError unless the sum holds as many samples as planned."""
    if found != planned:
        raise LedgerError(
            f"step {step}: the sum over all replicas holds {found} samples, and {planned} were planned; nothing was "
            "committed. All ranks must run the same version of recover with the same global_batch and policy"
        )
