"""Samples: which sample of the stream a slot stands for.

`exact`        slot i of step t is sample (t-1)*B + i of the stream, on every replica.
`partitioned`  (the paper) each replica draws from its own partition; the partition of a dead replica drops out.

The position is the same on all replicas and depends neither on B nor on their number: a resumed
run may change both, and uses each remaining sample once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Literal

SampleMode = Literal["exact", "partitioned"]


class ExactSamples:
    mode = "exact"

    def __init__(self, global_batch: int) -> None:
        self._global_batch = global_batch
        self._next = 0  # first sample of the step in progress

    def index(self, step: int, slot: int) -> int:
        return self._next + slot

    def committed(self, samples: list[int], contributed: bool) -> None:
        self._next += self._global_batch

    def coming(self, slots: Sequence[int]) -> tuple[list[int], range]:
        """Samples of these slots in this step and the next, and the range that this step may
        read."""
        step = range(self._next, self._next + self._global_batch)
        return [step[slot] for slot in slots] + [step.stop + slot for slot in slots], step

    def put_back(self) -> None:
        pass  # a slot has the same sample on every replica

    owners: Sequence[int] = ()

    def take_over(self, owners: Sequence[int]) -> None:
        pass

    def seat(self, replicas: Sequence[int]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class PartitionedSamples:
    """Replica r of W owns samples r, r + W, r + 2W, ... of the remaining ones, and draws them in
    order.

    Partitions advance at different rates: one may draw more in each step, and that of a dead
    replica stands still until a joining replica takes it over. With more replicas than
    partitions, all samples are partitioned again. Resumed with the same number of replicas, each
    continues with its own. With another number, new partitions are cut out of all unused
    samples: `_levels` holds how far each partition of each earlier cut had come.
    """

    mode = "partitioned"

    def __init__(self, replica: int, replicas: int) -> None:
        self._replica, self._replicas = replica, replicas
        self.owners = list(range(replicas))  # the replica of each partition
        self._levels: list[list[int]] = []
        self._used = [0] * replicas  # samples of each partition in committed steps
        self._drawn = 0  # samples of this partition in the step in progress

    def index(self, step: int, slot: int) -> int:
        self._drawn += 1
        return self._place(self._drawn - 1)

    def coming(self, slots: Sequence[int]) -> tuple[list[int], range]:
        """As in `ExactSamples`; this replica draws in order, whatever the slot."""
        drawn = self._drawn + 2 * len(slots)
        coming = [self._place(number) for number in range(drawn)]
        return coming[self._drawn :], range(coming[0], coming[-1] + 1) if coming else range(0)

    def _place(self, drawn: int) -> int:
        """The sample that this replica draws as number `drawn` (from 0) in the step in progress."""
        if self._replica not in self.owners:
            return 0  # a joining replica rehearses
        mine = self.owners.index(self._replica)
        place = mine + (self._used[mine] + drawn) * self._replicas
        for used in reversed(self._levels):
            place = _left(used, place)
        return place

    def committed(self, samples: list[int], contributed: bool) -> None:
        for place in samples:
            for used in self._levels:
                place = _left_below(used, place)
            self._used[place % self._replicas] += 1
        self._drawn = 0

    def put_back(self) -> None:
        """Draw the samples of this step again: they were not used."""
        self._drawn = 0

    def take_over(self, owners: Sequence[int]) -> None:
        """Take over, on a joining replica, the owner of each partition from the members."""
        self.owners, self._replicas = list(owners), len(owners)

    def seat(self, replicas: Sequence[int]) -> None:
        """Assign partitions after a join; `replicas`: all living ones."""
        came = sorted(set(replicas) - set(self.owners))
        free = [place for place, owner in enumerate(self.owners) if owner not in replicas]
        if len(came) > len(free):
            self._levels.append(self._used)
            self.owners, self._used = sorted(replicas), [0] * len(replicas)
        else:
            for place, replica in zip(free, came, strict=False):
                self.owners[place] = replica
        self._replicas, self._drawn = len(self.owners), 0

    def state_dict(self) -> dict[str, Any]:
        return {"used": [*self._levels, list(self._used)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        *self._levels, last = (list(used) for used in state["used"])
        if len(last) != self._replicas:
            self._levels.append(last)
            last = [0] * self._replicas
        self._used, self._drawn = last, 0


def _left(used: list[int], number: int) -> int:
    """The remaining sample number `number` (from 0), given how many of each partition are used."""
    ahead = max(used) * len(used)  # no sample behind this one is used
    if number >= ahead - sum(used):
        return number + sum(used)
    return bisect_right(range(ahead), number, key=lambda sample: _left_below(used, sample + 1))


def _left_below(used: list[int], sample: int) -> int:
    """Number of unused samples below this one."""
    if sample >= max(used) * len(used):
        return sample - sum(used)
    owned = (max(0, -(-(sample - replica) // len(used))) for replica in range(len(used)))
    return sum(max(0, there - gone) for there, gone in zip(owned, used, strict=True))


def sample_mode(mode: str, policy: str, global_batch: int, replica: int, replicas: int) -> Any:
    """The mapping from slots to samples of this name. Raises ValueError for a policy that cannot keep
    its samples exact."""
    if mode == "exact":
        if policy == "static":
            raise ValueError(
                "samples='exact' does not go with policy='static': a spare's samples are almost never the ones that a "
                "dead replica leaves behind; use policy='balanced', or samples='partitioned'"
            )
        return ExactSamples(global_batch)
    if mode == "partitioned":
        return PartitionedSamples(replica, replicas)
    raise ValueError(f"samples={mode!r} is not known; choose 'exact' or 'partitioned'")
