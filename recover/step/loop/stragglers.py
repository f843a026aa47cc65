"""Stragglers: replicas whose microbatches take far longer than those of the others.

Every replica reports its seconds per microbatch in the totals, so all survivors know all of them
and find the same stragglers.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping

from recover.policy import Layout

WINDOW = 8  # steps: a single slow one is noise
FAR = 2.0  # times the median of the others
NOISE = 0.005  # seconds per microbatch: a smaller difference is noise


class Stragglers:
    """Keeps the paces of the last committed steps."""

    def __init__(self, report: Callable[[str], None] = lambda text: None) -> None:
        self._paces: dict[int, deque[float]] = {}
        self._told: set[int] = set()
        self._report = report

    def state_dict(self) -> dict[int, list[float]]:
        return {replica: list(seen) for replica, seen in self._paces.items()}

    def load_state_dict(self, state: Mapping[int, list[float]]) -> None:
        self._paces = {replica: deque(seen, maxlen=WINDOW) for replica, seen in state.items()}

    def committed(self, paces: Mapping[int, float], step: int = 0) -> dict[int, float]:
        """`paces`: seconds per microbatch of each replica that ran any. Returns stragglers with
        their factors."""
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
        return found


def busy(layout: Layout, paces: Mapping[int, float], living: Collection[int]) -> dict[int, float]:
    """Seconds that each living replica computed its share of the layout; 0 for an empty share."""
    return {
        share.replica: paces.get(share.replica, 0.0) * len(share.run)
        for share in layout.shares
        if share.replica in living
    }
