"""The interface of a policy: a layout for the steps ahead, and a response to a loss inside a
step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from recover.policy.census import FailureEvent
from recover.policy.plan import Layout, PolicyDecision


class Policy(Protocol):
    """Two pure functions of the arguments and of what all replicas have agreed on in committed
    steps, so every survivor computes the same plan."""

    name: str

    def layout(self, replicas: Sequence[int], global_batch: int) -> Layout:
        """The layout of the next steps, for these living replicas."""
        ...

    def respond(self, event: FailureEvent) -> PolicyDecision:
        """The plan for the rest of the step in which `event` happened."""
        ...

    def committed(self, paces: Mapping[int, float], replicas: Sequence[int], global_batch: int) -> None:
        """A step was committed by these replicas; `paces`: agreed seconds per slot."""

    def state_dict(self) -> dict[str, Any]:
        """State from committed steps, for a joining replica."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Unpaced:
    """Base of policies that keep nothing: their plans depend on the living replicas and B alone."""

    def committed(self, paces: Mapping[int, float], replicas: Sequence[int], global_batch: int) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def living(replicas: Sequence[int], global_batch: int) -> list[int]:
    """The replicas in the order in which layouts deal to them; refuses what no layout can be
    made for."""
    if not replicas:
        raise ValueError("no replica is alive: a layout needs at least one")
    if global_batch < 1:
        raise ValueError(f"the global batch is {global_batch}: it must be at least one microbatch")
    order = sorted(set(replicas))
    if len(order) < len(replicas):
        raise ValueError(f"replicas {list(replicas)} name one twice: every living replica is named once")
    return order
