"""One attempt at a step on this rank: the share to run, what of it is in the local sums, and
what its vote has shown."""

from __future__ import annotations

import math

from recover.gradients.deferred import DeviceValue, now
from recover.policy import Holding, Share


class Attempt:
    """The state of one attempt, from the layout or the plan of a repair until the vote. A repair
    replaces it by the attempt that follows.

    share:    slots to run, and slots that an earlier attempt has left in the local sums
    planned:  number of samples in the sum over all replicas
    """

    def __init__(self, share: Share, planned: int) -> None:
        self.share, self.planned = share, planned
        self.samples: dict[int, int] = {}  # sample of each slot in the local sums
        self.contents = 0  # sum of the checksums of these samples
        # What the vote of this attempt has shown on this rank.
        self.complete = False  # all buckets hold the sum of exactly the planned samples
        self.finite = True  # if complete
        self.in_range = True  # if complete: summed with the exponents that its largest values require
        self.overflowed = False  # all replicas agree that it was not in range: they run the step again
        self.tainted = False  # summed together with a replica whose state differs: must not be committed
        self.has_wrong_sums = (
            False  # if complete: the reduced sums do not have the checksum of what was added
        )
        self.damaged = False  # nor do the local sums of this rank
        self.wrong_before = 0  # attempts at this step before this one whose reduced sums were wrong
        self._done = share.kept
        self._losses: list[tuple[float | DeviceValue[float], float, int]] = []  # with weights and slots
        self._computed: list[tuple[float | DeviceValue[float], float]] = []  # seconds and number of slots

    def following(self, share: Share, planned: int) -> Attempt:
        """The attempt after a repair. The slots that `share` keeps stay in the local sums: all of them, or
        none, since a policy never keeps a part. Times are kept, too: microbatches that do not count
        have cost their time."""
        attempt = Attempt(share, planned)
        attempt._computed = self._computed
        attempt.wrong_before = self.wrong_before + self.has_wrong_sums
        if share.kept:
            attempt.samples, attempt._losses = self.samples, self._losses
            attempt.contents = self.contents
        return attempt

    def finish_slot(
        self, slot: int, sample: int, loss: float | DeviceValue[float], weight: float, checksum: int = 0
    ) -> None:
        """Note a microbatch that is in the local sums, or will be once the device has run it: its loss
        is read at the vote."""
        self.samples[slot] = sample
        self.contents += checksum
        self._losses.append((loss, weight, slot))
        self._done = self._done | self._done.span(slot, slot + 1)

    def computed(self, seconds: float | DeviceValue[float], slots: float) -> None:
        """Note how long this rank took for a number of slots; the time to fill a pipeline counts as that
        of further slots."""
        self._computed.append((seconds, slots))

    @property
    def unread(self) -> list[float | DeviceValue[float]]:
        """Values that may still be on a device."""
        return [*(loss for loss, _, _ in self._losses), *(seconds for seconds, _ in self._computed)]

    @property
    def weighted_losses(self) -> list[float]:
        return [now(loss) * weight for loss, weight, _ in self._losses]

    @property
    def not_finite(self) -> set[int]:
        """Slots whose loss is an infinity or NaN."""
        return {slot for loss, weight, slot in self._losses if not math.isfinite(now(loss) * weight)}

    @property
    def total_weight(self) -> float:
        total = 0.0
        for _, weight, _ in self._losses:
            total += weight
        return total

    @property
    def wrong_sums(self) -> int:
        """How often the reduced sums of this step were wrong on this rank; 0 if those of this attempt are
        right."""
        return self.wrong_before + 1 if self.has_wrong_sums else 0

    @property
    def pace(self) -> float | None:
        """Seconds per slot of this rank in this step so far; None if it has run none."""
        ran = sum(count for _, count in self._computed)
        return sum(now(seconds) for seconds, _ in self._computed) / ran if ran else None

    @property
    def contributed(self) -> list[int]:
        """Samples in this replica's sum; a spare contributes none."""
        return sorted(self.samples.values()) if self.share.counts else []

    @property
    def holding(self) -> Holding:
        """The contents of the local sums of this replica, for its census record."""
        return self.share.holding(self._done - self.share.kept)
