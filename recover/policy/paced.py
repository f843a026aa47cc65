"""Shares by speed: B is dealt so that all replicas finish at about the same time.

All replicas know the seconds per microbatch of every replica in every committed step, because
these are among the agreed totals. This policy keeps them for some steps and derives a factor for
each replica. Everything it keeps follows from agreed numbers, so it is the same on all ranks;
joining replicas receive it. Which replica computes a slot does not change the samples of a step,
so exact samples and reproducible sums have the same bits as with `balanced`.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from recover.policy.base import living
from recover.policy.census import FailureEvent
from recover.policy.plan import Layout, PolicyDecision
from recover.policy.response import complete_batch
from recover.policy.roles import Role
from recover.policy.slots import SlotSet

WINDOW = 15  # steps over which the median is taken
KNOWN = 8  # steps after which a replica's factor is used: more than half of a window
# Other shares are dealt when they shorten the computing of a step by this factor at least, so that noise does not
# move slots to and fro.
GAIN = 1.08
GRAIN = 64  # a factor is a whole number of 1/64: equal replicas have equal factors despite small differences


class PacedWorldPolicy:
    """Every replica runs at least one slot; the next slot goes to the replica that would finish it first.

    fill:  time that a replica needs in addition to its slots, in slots: a pipeline of p stages fills in p - 1
    """

    name = "paced"

    def __init__(self, fill: float = 0.0) -> None:
        self._fill = fill
        self._ratios: dict[
            int, deque[float]
        ] = {}  # seconds per slot over the median of the replicas, by step
        self._factors: dict[int, int] = {}  # with which shares are dealt, in 1/GRAIN
        self._settling = 0  # steps until the window holds no step before the last change of shares

    def layout(self, replicas: Sequence[int], global_batch: int) -> Layout:
        order = living(replicas, global_batch)
        sizes = self._deal(global_batch, order, self._factors, least=1)
        roles = [Role.MAJOR if size == max(sizes) else Role.MINOR for size in sizes]
        return Layout.of(zip(order, roles, SlotSet.span(0, global_batch).deal(sizes), strict=True))

    def respond(self, event: FailureEvent) -> PolicyDecision:
        return complete_batch(event, lambda missing, workers: self._deal(missing, workers, self._factors))

    def committed(self, paces: Mapping[int, float], replicas: Sequence[int], global_batch: int) -> None:
        """A step was committed; `paces`: seconds per slot of each replica that ran any."""
        order = living(replicas, global_batch)
        # A ratio: microbatches of some steps take longer on all replicas, as long sequences do.
        typical = statistics.median(paces.values()) if paces else 0.0
        self._ratios = {replica: self._ratios.get(replica, deque(maxlen=WINDOW)) for replica in order}
        self._factors = {replica: factor for replica, factor in self._factors.items() if replica in order}
        for replica, seconds in paces.items():
            if replica in self._ratios and typical > 0:
                self._ratios[replica].append(seconds / typical)
        self._reconsider(order, global_batch)

    def _reconsider(self, order: list[int], global_batch: int) -> None:
        """Deal by the latest factors if that is worth it."""
        latest = self._factors | {
            replica: max(1, round(GRAIN * statistics.median(seen)))
            for replica, seen in self._ratios.items()
            if len(seen) >= KNOWN
        }
        dealt, better = (self._deal(global_batch, order, factors, 1) for factors in (self._factors, latest))
        # The first factors after a change of speed stand on few steps behind it: the shares are corrected once, when
        # the whole window lies behind it.
        has_settled = self._settling == 1
        self._settling = max(0, self._settling - 1)
        if self._computing(dealt, order, latest) > GAIN * self._computing(better, order, latest):
            self._factors, self._settling = latest, WINDOW
        elif has_settled:
            self._factors = latest

    def state_dict(self) -> dict[str, Any]:
        """State for a joining replica. Checkpoints have none of it: the replicas of a resumed run may
        be on other machines."""
        return {
            "ratios": {replica: list(seen) for replica, seen in self._ratios.items()},
            "factors": dict(self._factors),
            "settling": self._settling,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ratios = {replica: deque(seen, maxlen=WINDOW) for replica, seen in state["ratios"].items()}
        self._factors, self._settling = dict(state["factors"]), state["settling"]

    def _computing(self, sizes: Sequence[int], order: Sequence[int], factors: Mapping[int, int]) -> float:
        """Time until the last replica has run its share, in 1/GRAIN slots of a typical replica."""
        return max(
            factors.get(replica, GRAIN) * (size + self._fill) * bool(size)
            for replica, size in zip(order, sizes, strict=True)
        )

    def _deal(
        self, slots: int, replicas: Sequence[int], factors: Mapping[int, int], least: int = 0
    ) -> list[int]:
        """Replicas without a factor count as typical."""
        return deal_by_speed(slots, [factors.get(replica, GRAIN) for replica in replicas], self._fill, least)


def deal_by_speed(slots: int, factors: Sequence[int], fill: float = 0.0, least: int = 0) -> list[int]:
    """The number of slots for each of several replicas, so that the last of them finishes as early as possible.

    factors:  time of a replica per slot
    fill:     time of a replica in addition to its slots, in slots
    least:    slots that each replica gets in any case, as far as there are enough; the fastest replicas are served
              first
    """
    sizes = [0] * len(factors)
    fastest = sorted(range(len(factors)), key=lambda place: (factors[place], place))
    for place in fastest[: slots // least] if least else ():
        sizes[place] = least
    # All slots that finish before `level` belong to the answer, and a few are left to deal one by one: with
    # thousands of slots dealing each of them takes milliseconds in every step.
    level = (slots + len(factors) * fill) / sum(1 / factor for factor in factors) * (1 - 1e-9)
    quick = [max(size, math.floor(level / f - fill)) for size, f in zip(sizes, factors, strict=True)]
    if sum(quick) <= slots:
        sizes = quick
    queue = [
        (factor * (size + 1 + fill), place)
        for place, (factor, size) in enumerate(zip(factors, sizes, strict=True))
    ]
    heapq.heapify(queue)
    for _ in range(slots - sum(sizes)):
        _, place = queue[0]
        sizes[place] += 1
        heapq.heapreplace(queue, (factors[place] * (sizes[place] + 1 + fill), place))
    return sizes
