"""Which sample a slot stands for.

`exact`        slot i of step t is sample (t-1)*B + i of the stream, whoever computes it.
`partitioned`  (the paper) a replica draws from a partition of its own, and a dead replica's partition drops out.

Where a run stands is the same on all replicas, and does not depend on B or on their number: another run can go on from
it with others, and uses each sample that is left once.
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
        self._next = 0  # the first sample of the step under way

    def index(self, step: int, slot: int) -> int:
        return self._next + slot

    def committed(self, samples: list[int], contributed: bool) -> None:
        self._next += self._global_batch

    def coming(self, slots: Sequence[int]) -> tuple[list[int], range]:
        """What these slots will ask for in this step and the next, and all that this step may ask for."""
        step = range(self._next, self._next + self._global_batch)
        return [step[slot] for slot in slots] + [step.stop + slot for slot in slots], step

    def put_back(self) -> None:
        pass  # a slot is its sample, whoever runs it

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
    """Replica r of W owns samples r, r + W, r + 2W, ... of those that are left, and draws them one after the other.

    Partitions need not advance alike: one of W may draw more in each step, and that of a dead replica stands still,
    until one that joins takes it over. If there are more replicas then than partitions, all are cut anew.
    Resumed with as many replicas, each goes on with its own. With another number, new partitions are cut out of all
    samples that nobody has used: `_levels` holds how far each partition of each earlier cut had come.
    """

    mode = "partitioned"

    def __init__(self, replica: int, replicas: int) -> None:
        self._replica, self._replicas = replica, replicas
        self.owners = list(range(replicas))  # the replica of each partition
        self._levels: list[list[int]] = []
        self._used = [0] * replicas  # of each partition, in committed steps
        self._drawn = 0  # of this one, in the step under way

    def index(self, step: int, slot: int) -> int:
        self._drawn += 1
        return self._place(self._drawn - 1)

    def coming(self, slots: Sequence[int]) -> tuple[list[int], range]:
        """As above; this replica draws one after the other, in whatever slot."""
        drawn = self._drawn + 2 * len(slots)
        coming = [self._place(number) for number in range(drawn)]
        return coming[self._drawn :], range(coming[0], coming[-1] + 1) if coming else range(0)

    def _place(self, drawn: int) -> int:
        """The sample that this replica draws as number `drawn` (from 0) in the step under way."""
        if self._replica not in self.owners:
            return 0  # one that has not joined yet rehearses
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
        """What this replica drew in this step was not used: it draws it again."""
        self._drawn = 0

    def take_over(self, owners: Sequence[int]) -> None:
        """For one that joins: whose partitions these are with the others."""
        self.owners, self._replicas = list(owners), len(owners)

    def seat(self, replicas: Sequence[int]) -> None:
        """These live now, and some of them have just come."""
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
    """The sample that is left as number `number` (from 0) when so many of each partition are used."""
    ahead = max(used) * len(used)  # from here on, none is used
    if number >= ahead - sum(used):
        return number + sum(used)
    return bisect_right(range(ahead), number, key=lambda sample: _left_below(used, sample + 1))


def _left_below(used: list[int], sample: int) -> int:
    """How many samples are left below this one."""
    if sample >= max(used) * len(used):
        return sample - sum(used)
    owned = (max(0, -(-(sample - replica) // len(used))) for replica in range(len(used)))
    return sum(max(0, there - gone) for there, gone in zip(owned, used, strict=True))


def sample_mode(mode: str, policy: str, global_batch: int, replica: int, replicas: int) -> Any:
    """The mapping of this name; refuses a pair that cannot keep its promise."""
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
