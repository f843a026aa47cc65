"""The top layer: how the B microbatches of a step are shared out, and shared out again after a
loss.

Pure functions on integers and slot sets; nothing here knows of tensors, processes or messages.
"""

from __future__ import annotations

from typing import Final

from recover.policy.adaptive import AdaptiveWorldPolicy
from recover.policy.balanced import BalancedWorldPolicy
from recover.policy.base import Policy
from recover.policy.census import FailureEvent, Holding
from recover.policy.paced import PacedWorldPolicy
from recover.policy.plan import Layout, PolicyDecision, Share
from recover.policy.roles import RestoreMode, Role
from recover.policy.slots import SlotSet
from recover.policy.static import StaticWorldPolicy

__all__ = [
    "DEFAULT_POLICY",
    "AdaptiveWorldPolicy",
    "BalancedWorldPolicy",
    "FailureEvent",
    "Holding",
    "Layout",
    "PacedWorldPolicy",
    "Policy",
    "PolicyDecision",
    "RestoreMode",
    "Role",
    "Share",
    "SlotSet",
    "StaticWorldPolicy",
    "get_policy",
]

DEFAULT_POLICY: Final = "balanced"  # of the step, the trainer and the plan


def get_policy(name: str, initial_replicas: int, fill: float = 0.0) -> Policy:
    """The policy of this name. `initial_replicas`: replicas at the start of the job (for
    `adaptive`); `fill`: slots that a pipeline takes to fill (for `paced`)."""
    match name:
        case "static":
            return StaticWorldPolicy()
        case "balanced":
            return BalancedWorldPolicy()
        case "adaptive":
            return AdaptiveWorldPolicy(initial_replicas)
        case "paced":
            return PacedWorldPolicy(fill)
    raise ValueError(f"policy {name!r} is not known: choose static, balanced, paced or adaptive")
