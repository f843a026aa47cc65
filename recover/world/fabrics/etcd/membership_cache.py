"""What a rank has heard: deaths, decisions, who asks to join. From a watch, and from answers to what it asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from recover.world.fabrics.etcd.agreement import ASKING, DEAD, DECISION, ENDED, Decision, rank_of
from recover.world.fabrics.etcd.client import KeyValue

WITH_REPLICA = "lost with its replica"  # so begins what it is told that is itself not at fault


class News:
    """It never forgets a death, and knows why this rank itself must not act any more, if so.

    `replica`: the ranks of its replica, itself included.
    """

    def __init__(self, rank: int, start: Decision, takes_part: bool, replica: Sequence[int] = ()) -> None:
        self.decision = start  # the last one that there is, as far as this rank knows
        self.takes_part = takes_part
        self.ended = ""  # why nobody can join any more
        self.over = ""  # why this rank must not act any more
        self._rank, self._has_mates = rank, len(replica) > 1
        self.lost = (
            WITH_REPLICA if self._has_mates else "declared dead"
        )  # where nobody can tell of whom it was said
        self._arrived = threading.Condition()
        self._dead: list[int] = []  # in the order of their revisions, which is the same for all
        self._asking: set[int] = set()

    @property
    def dead(self) -> tuple[int, ...]:
        with self._arrived:
            return tuple(self._dead)

    @property
    def asking(self) -> frozenset[int]:
        with self._arrived:
            return frozenset(self._asking)

    def wait_for(self, what: Callable[[], object], seconds: float) -> None:
        with self._arrived:
            self._arrived.wait_for(lambda: what() or self.over, seconds)

    def hear(self, news: Sequence[KeyValue]) -> None:
        """All of it brings the earlier deaths before the later."""
        with self._arrived:
            for found in sorted(news, key=lambda found: found.modified):
                if found.key.startswith(ASKING):
                    (self._asking.add if found.version else self._asking.discard)(rank_of(found))
                elif not found.version:
                    pass
                elif found.key.startswith(DEAD):
                    self._note(rank_of(found), found.value.decode())
                elif found.key == ENDED:
                    self.ended = found.value.decode()
                elif found.key == DECISION and found.version > self.decision.number:
                    decision = Decision.in_place(found)
                    if decision is None:
                        continue  # the next look of the main thread ends this rank
                    self.decision = decision
                    if self._has_mates and self._rank in decision.dead and not self.over:
                        # Nobody has declared this one: a mate of its.
                        self.over = f"{WITH_REPLICA}: agreement {decision.number} counts it among the dead"
                    for rank in sorted(decision.dead):  # also if their own keys are gone by now
                        self._note(rank, f"agreement {decision.number} counts it among the dead")
                    if self.takes_part and self._rank not in decision.participants and not self.over:
                        self.over = f"{self.lost}: it is no participant after agreement {decision.number}"
            self._arrived.notify_all()

    def wake(self) -> None:
        with self._arrived:
            self._arrived.notify_all()

    def admitted(self) -> bool:
        return self._rank in self.decision.participants

    def _note(self, rank: int, why: str) -> None:
        if rank == self._rank:
            self.over = self.over or f"rank {rank} was declared dead: {why}"
        elif rank not in self._dead:
            self._dead.append(rank)
