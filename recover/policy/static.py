"""The paper's policy (section 4.3): majors, at most one minor, and the remaining replicas as
spares."""

from __future__ import annotations

from collections.abc import Sequence

from recover.policy.base import Unpaced, living
from recover.policy.census import FailureEvent
from recover.policy.plan import Layout, PolicyDecision
from recover.policy.response import complete_batch
from recover.policy.roles import Role
from recover.policy.slots import SlotSet


class StaticWorldPolicy(Unpaced):
    """The smallest accumulation that lets W replicas reach B: majors while they fit, a minor for
    the rest."""

    name = "static"

    def layout(self, replicas: Sequence[int], global_batch: int) -> Layout:
        order = living(replicas, global_batch)
        accum = -(-global_batch // len(order))
        majors, remainder = divmod(global_batch, accum)
        minors = 1 if remainder else 0
        spares = len(order) - majors - minors
        minor_spares = 1 if minors and spares >= 2 else 0
        roles = (
            [Role.MAJOR] * majors
            + [Role.MINOR] * minors
            + [Role.MAJOR_SPARE] * (spares - minor_spares)
            + [Role.MINOR_SPARE] * minor_spares
        )
        sizes = [accum if role.promoted is Role.MAJOR else remainder for role in roles]
        # Majors and minors get exactly the slots 0..B-1. Spares come last in the order, so their
        # slots are numbered from B.
        return Layout.of(zip(order, roles, SlotSet.span(0, sum(sizes)).deal(sizes), strict=True))

    def respond(self, event: FailureEvent) -> PolicyDecision:
        return complete_batch(event)
