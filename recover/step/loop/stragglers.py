"""Stragglers: replicas whose microbatches take far longer than those of the others.

Every replica reports its seconds per microbatch in the totals, so all survivors know all of them
and find the same stragglers.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from recover.policy import Layout

WINDOW = 8  # steps: a single slow one is noise
FAR = 2.0  # times the median of the others
NOISE = 0.005  # seconds per microbatch: a smaller difference is noise


@dataclass(frozen=True)
class StragglerEviction:
    """When a replica that is far slower than the others is evicted.

    factor:        how many times as long as the median of the others it takes, over 8 steps
    every:         steps between two evictions, at least
    min_replicas:  replicas that stay, at least, even if another one dies at the same moment
    """

    factor: float
    every: int = 100
    min_replicas: int = 1

    def __post_init__(self) -> None:
        if self.factor < FAR:
            raise ValueError(
                f"a replica would be evicted for taking {self.factor:g} times as long as the others, and replicas "
                f"count as stragglers from {FAR:g} times on; raise the factor to {FAR:g} or more"
            )
        if self.every < 1 or self.min_replicas < 1:
            raise ValueError(
                f"StragglerEviction has every={self.every}, min_replicas={self.min_replicas}; each must be at least 1"
            )

    def choose(self, stragglers: Mapping[int, float], living: int, steps_since: int | None) -> int | None:
        """The replica to evict, if any. `steps_since`: steps since the last eviction."""
        too_soon = steps_since is not None and steps_since < self.every
        slowest = max(stragglers, key=lambda replica: (stragglers[replica], -replica), default=None)
        if slowest is None or too_soon or living <= self.min_replicas + 1:
            return None
        return slowest if stragglers[slowest] >= self.factor else None


class Stragglers:
    """Keeps the paces of the last committed steps."""

    def __init__(
        self, report: Callable[[str], None] = lambda text: None, eviction: StragglerEviction | None = None
    ) -> None:
        self._paces: dict[int, deque[float]] = {}
        self._told: set[int] = set()
        self._report, self._eviction = report, eviction
        self._due: dict[int, str] = {}  # to evict before the next step, and why
        self._evicted_at: int | None = None  # the step after which a replica was evicted last
        self._evicted_before: int | None = None  # the same before the eviction that is due

    def state_dict(self) -> dict[str, Any]:
        paces = {replica: list(seen) for replica, seen in self._paces.items()}
        return {"paces": paces, "evicted_at": self._evicted_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._paces = {replica: deque(seen, maxlen=WINDOW) for replica, seen in state["paces"].items()}
        self._evicted_at = state["evicted_at"]

    def take_eviction(self) -> dict[int, str]:
        """The replica that all members evict before the next step, with the reason; only once: a
        member that leaves the step and begins it again must not enter a repair that the others
        have behind them."""
        due, self._due = self._due, {}
        return due

    def postpone(self, due: Mapping[int, str]) -> None:
        """The eviction `due` was not carried out: decide again after the next step."""
        if due:
            self._evicted_at = self._evicted_before

    def committed(self, paces: Mapping[int, float], step: int = 0, living: int = 0) -> dict[int, float]:
        """Note the paces of a committed step. Returns stragglers with their factors.

        `paces`: seconds per microbatch of each replica that ran any; `living`: number of replicas.
        """
        # Dead replicas are dropped.
        self._paces = {replica: self._paces.get(replica, deque(maxlen=WINDOW)) for replica in paces}
        for replica, seconds in paces.items():
            self._paces[replica].append(seconds)
        typical = {r: statistics.median(seen) for r, seen in self._paces.items() if len(seen) == WINDOW}
        found = {}
        for replica, seconds in typical.items():
            others = [value for other, value in typical.items() if other != replica]
            if others and seconds > FAR * statistics.median(others) + NOISE:
                found[replica] = round(seconds / statistics.median(others), 2)
        for replica in found.keys() - self._told:
            self._report(
                f"step {step}: replica {replica} takes {found[replica]:g} times as long as the others"
            )
        self._told = set(found)
        self._judge(found, step, living)
        return found

    def _judge(self, found: Mapping[int, float], step: int, living: int) -> None:
        """Decide which replica is evicted, from agreed numbers alone, so all members decide alike."""
        if self._eviction is None:
            return
        since = None if self._evicted_at is None else step - self._evicted_at
        replica = self._eviction.choose(found, living, since)
        if replica is not None:
            limit = self._eviction.factor
            self._evicted_before, self._evicted_at = self._evicted_at, step
            self._due = {
                replica: f"it takes {found[replica]:g} times as long as the others, and the limit is {limit:g}"
            }


def busy(
    layout: Layout, paces: Mapping[int, float], living: Collection[int], fill: float = 0.0
) -> dict[int, float]:
    """Seconds that each living replica computed its share of the layout; 0 for an empty share."""
    return {
        share.replica: paces.get(share.replica, 0.0) * (len(share.run) + fill) * bool(share.run)
        for share in layout.shares
        if share.replica in living
    }
