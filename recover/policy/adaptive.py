"""The paper's strawman (appendix D): repair and go on with what is left. The batch shrinks with
the world."""

from __future__ import annotations

from collections.abc import Sequence

from recover.policy.base import Unpaced, living
from recover.policy.census import FailureEvent
from recover.policy.plan import Layout, PolicyDecision, Share
from recover.policy.roles import RestoreMode, Role
from recover.policy.slots import SlotSet, even


class AdaptiveWorldPolicy(Unpaced):
    """Every replica runs what a replica ran when the job started. A baseline: it does not keep
    B."""

    name = "adaptive"

    def __init__(self, initial_replicas: int) -> None:
        self.initial_replicas = initial_replicas

    def layout(self, replicas: Sequence[int], global_batch: int) -> Layout:
        order = living(replicas, global_batch)
        # A world larger than at the start shares B, so that the batch never exceeds it.
        sizes = even(global_batch, max(self.initial_replicas, len(order)))[: len(order)]
        roles = [Role.MAJOR if size == sizes[0] else Role.MINOR for size in sizes]
        return Layout.of(zip(order, roles, SlotSet.span(0, sum(sizes)).deal(sizes), strict=True))

    def respond(self, event: FailureEvent) -> PolicyDecision:
        shares = (Share(h.replica, h.role, h.counts, h.slots, SlotSet()) for h in event.census)
        return PolicyDecision(tuple(shares), RestoreMode.BLOCKING)
