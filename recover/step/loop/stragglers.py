"""Who holds the others up: replicas whose own microbatches take far longer than those of the others.

Every replica adds its seconds per microbatch to a sum that is reduced anyway, in a place of its own, so all survivors
know all of them, and say the same.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping

from recover.policy import Layout

WINDOW = 8  # steps: a single slow one is noise
FAR = 2.0  # times the median of the others
NOISE = 0.005  # seconds per microbatch: less than that is the machine's own unrest


class Stragglers:
    """Fed with each committed step; remembers the last few."""

    def __init__(self, report: Callable[[str], None] = lambda text: None) -> None:
        self._paces: dict[int, deque[float]] = {}
        self._told: set[int] = set()
        self._report = report

    def state_dict(self) -> dict[int, list[float]]:
        return {replica: list(seen) for replica, seen in self._paces.items()}

    def load_state_dict(self, state: Mapping[int, list[float]]) -> None:
        self._paces = {replica: deque(seen, maxlen=WINDOW) for replica, seen in state.items()}

    def committed(self, paces: Mapping[int, float], step: int = 0) -> dict[int, float]:
        """`paces`: seconds per microbatch of every replica that has run some. Who straggles, and by which factor."""
        self._paces = {
            replica: self._paces.get(replica, deque(maxlen=WINDOW)) for replica in paces
        }  # the dead are forgotten
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
    """Seconds that each living replica has computed what it was dealt when the step began; 0 if that was nothing."""
    return {
        share.replica: paces.get(share.replica, 0.0) * len(share.run)
        for share in layout.shares
        if share.replica in living
    }
