"""Cache of the membership in etcd: deaths, the last decision, ranks that ask to join.

Filled by the watch, on its thread, and by answers to this rank's own requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from recover.world.fabrics.base import DeclaredDeadError
from recover.world.fabrics.etcd.agreement import ASKING, DEAD, DECISION, ENDED, Decision, rank_of
from recover.world.fabrics.etcd.client import KeyValue

# First words of the reason for a rank that is lost because another rank of its replica is.
WITH_REPLICA = "lost with its replica"
# Seconds after the death of another rank of the replica in which this rank may end by itself.
ORPHANED = 1.0


class MembershipCache:
    """Deaths are permanent. `fatal` is set once this rank has been declared dead, with the reason.

    `replica`: the ranks of its replica, itself included.
    """

    def __init__(self, rank: int, start: Decision, takes_part: bool, replica: Sequence[int] = ()) -> None:
        self.decision = start  # the last one that this rank knows of
        self.takes_part = takes_part
        self.ended = ""  # why no replica can join any more
        self.fatal = ""  # why this rank must not act any more
        self._rank, self._replica = rank, frozenset(replica)
        # The reason where it is unknown which rank of the replica was declared dead.
        self.lost = WITH_REPLICA if self._has_peers else "declared dead"
        self._changed = threading.Condition()
        self._dead: list[int] = []  # in the order of their revisions, which is the same on all ranks
        self._asking: set[int] = set()
        self._orphaned_at = 0.0

    @property
    def _has_peers(self) -> bool:
        return len(self._replica) > 1

    @property
    def dead(self) -> tuple[int, ...]:
        with self._changed:
            return tuple(self._dead)

    @property
    def asking(self) -> frozenset[int]:
        with self._changed:
            return frozenset(self._asking)

    def admitted(self) -> bool:
        return self._rank in self.decision.participants

    def wait_for(self, condition: Callable[[], object], seconds: float) -> None:
        """Wait until `condition()`, or until this rank was declared dead."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or self.fatal, seconds)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def check(self) -> None:
        """Raise DeclaredDeadError if this rank was declared dead, or lost with its replica some
        time ago."""
        if self.fatal:
            self.end(self.fatal)
        if lost := self._replica.intersection(self.dead):
            # The watcher of this rank ends it by itself; this is for a rank without one.
            self._orphaned_at = self._orphaned_at or time.monotonic()
            if time.monotonic() > self._orphaned_at + ORPHANED:
                self.end(f"{WITH_REPLICA}: ranks {sorted(lost)} of it are dead")

    def end(self, why: str) -> NoReturn:
        """Raise DeclaredDeadError, in this call and in every later one of the fabric: this rank
        must not act any more."""
        self.fatal = self.fatal or why
        raise DeclaredDeadError(why, orphan=why.startswith(WITH_REPLICA))

    def apply(self, changes: Sequence[KeyValue]) -> None:
        """Take in changes of keys, in the order of their revisions: so all ranks note deaths in the
        same order."""
        with self._changed:
            for found in sorted(changes, key=lambda found: found.modified):
                if found.key.startswith(ASKING):
                    (self._asking.add if found.version else self._asking.discard)(rank_of(found))
                elif not found.version:
                    pass  # deaths and the last decision are never taken back
                elif found.key.startswith(DEAD):
                    self._note_death(rank_of(found), found.value.decode())
                elif found.key == ENDED:
                    self.ended = found.value.decode()
                elif found.key == DECISION and found.version > self.decision.number:
                    self._note_decision(found)
            self._changed.notify_all()

    def _note_decision(self, found: KeyValue) -> None:
        decision = Decision.in_place(found)
        if decision is None:
            return  # it was put back; the next read of the main thread raises LostDataError
        self.decision = decision
        if self._has_peers and self._rank in decision.dead and not self.fatal:
            # This rank itself was not declared dead, so another rank of its replica was.
            self.fatal = f"{WITH_REPLICA}: agreement {decision.number} counts it among the dead"
        for rank in sorted(decision.dead):  # also if their own keys were deleted meanwhile
            self._note_death(rank, f"agreement {decision.number} counts it among the dead")
        if self.takes_part and self._rank not in decision.participants and not self.fatal:
            self.fatal = f"{self.lost}: it is no participant after agreement {decision.number}"

    def _note_death(self, rank: int, why: str) -> None:
        if rank == self._rank:
            self.fatal = self.fatal or f"rank {rank} was declared dead: {why}"
        elif rank not in self._dead:
            self._dead.append(rank)
