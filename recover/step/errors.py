"""Errors that all replicas raise alike."""

from __future__ import annotations


class StateDivergedError(RuntimeError):
    """Replicas hold different state, and no majority tells which is right. `states`: the
    replicas of each state."""

    def __init__(self, text: str, states: tuple[tuple[int, ...], ...] = ()) -> None:
        super().__init__(text)
        self.states = states

    def say(self, more: str) -> None:
        """Append the remedy to the message: some readers show only one line."""
        self.args = (f"{self.args[0]}; {more}",)


class SkippedStepsError(RuntimeError):
    """Too many steps in a row did not call the optimizer (`skip_limit`)."""


class CorruptGradientError(RuntimeError):
    """Replicas computed different gradients from the same state and sample, and no replica can be
    trusted; or `verify` is impossible because kernels are not deterministic."""
