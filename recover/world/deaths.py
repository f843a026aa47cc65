"""The deaths that a rank knows, and whether more of them are to be expected at once.

Deaths come in bursts: what kills one process of a host often kills others. Open MPI crashes healthy
ranks if a death is noticed while a communicator is made, so one is made only when the burst seems to be
over: either no death was noticed for a while, or a single one was noticed and all other ranks have just
shown that they live. That they die a moment later cannot be excluded either way.
"""

from __future__ import annotations

from collections.abc import Mapping

from recover.world.fabrics.base import Fabric

# Seconds that count between two looks. A rank that was suspended for longer may have notices that wait
# to be read: the time without looks says nothing.
BETWEEN_LOOKS = 0.01
RECENT = 0.01  # seconds; a rank beats every 5 ms
BURST = 0.25  # seconds; deaths that are noticed so close to each other belong together


class KnownDeaths:
    """Its callers hold the fabric's lock: the watcher while the main thread computes, and the repair."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._failed: frozenset[int] | None = None
        self._looked = 0.0
        self._quiet = 0.0  # seconds without a new notice, as far as this rank has looked
        self._noticed_at, self._is_single = float("-inf"), True  # the last notice
        # The heartbeats at some moment of the last RECENT seconds, after the last notice.
        self._before: Mapping[int, int] = {}
        self._before_at = 0.0

    def look(self) -> frozenset[int]:
        """The ranks that this rank knows to be dead."""
        failed, now = self._fabric.failed(), self._fabric.now()
        is_new = failed != self._failed
        if new := failed - (self._failed or frozenset()):
            self._is_single = len(new) == 1 and now - self._noticed_at > BURST
            self._noticed_at = now
        self._failed = failed
        self._quiet = 0.0 if is_new else self._quiet + min(now - self._looked, BETWEEN_LOOKS)
        self._looked = now
        if is_new or now - self._before_at > RECENT:
            self._before, self._before_at = self._fabric.heartbeats(), now
        return failed

    def have_settled(self, seconds: float) -> bool:
        """Whether there was no new notice for so long, or the last one was single and all other ranks have
        beaten since then and within RECENT seconds. Ranks without a heartbeat that this rank can read may
        be dead."""
        failed = self.look()
        if self._quiet >= seconds:
            return True
        if not self._is_single:
            return False
        beats = self._fabric.heartbeats()
        others = self._fabric.participants - failed - {self._fabric.rank}
        return all(rank in beats and beats[rank] != self._before.get(rank) for rank in others)
