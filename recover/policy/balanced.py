"""The policy for exact data: no spares, B spread as evenly as it goes, and lost slots run again
by number."""

from __future__ import annotations

from collections.abc import Sequence

from recover.policy.base import Unpaced, living
from recover.policy.census import FailureEvent
from recover.policy.plan import Layout, PolicyDecision
from recover.policy.response import complete_batch
from recover.policy.roles import Role
from recover.policy.slots import SlotSet, even


class BalancedWorldPolicy(Unpaced):
    """Every replica runs floor(B/W) or ceil(B/W). Without spares, what is missing is just what
    was lost."""

    name = "balanced"

    def layout(self, replicas: Sequence[int], global_batch: int) -> Layout:
        order = living(replicas, global_batch)
        sizes = even(global_batch, len(order))
        roles = [Role.MAJOR if size == sizes[0] else Role.MINOR for size in sizes]
        return Layout.of(zip(order, roles, SlotSet.span(0, global_batch).deal(sizes), strict=True))

    def respond(self, event: FailureEvent) -> PolicyDecision:
        return complete_batch(event)
