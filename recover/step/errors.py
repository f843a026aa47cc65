"""Why a step cannot go on, on all replicas alike."""

from __future__ import annotations


class StateDivergedError(RuntimeError):
    """Replicas hold different state, and nobody can tell which is right. `states`: the replicas of each state."""

    def __init__(self, text: str, states: tuple[tuple[int, ...], ...] = ()) -> None:
        super().__init__(text)
        self.states = states

    def say(self, more: str) -> None:
        """Add what to do, for everybody who is told of the error in one line."""
        self.args = (f"{self.args[0]}; {more}",)
