"""Signs of life and activities of ranks, as the board shows them."""

from __future__ import annotations

from dataclasses import dataclass

Suspects = tuple[tuple[int, int], ...]  # slots and their samples


@dataclass(frozen=True)
class Sign:
    """The signs of life of a rank."""

    heartbeat: int
    progress: tuple[int, ...]
    late: bool  # it is in this rank's step, this rank has voted, and no rank is further behind
    stopped: bool = False  # by a signal or a debugger, as the kernel says
    step: int = 0
    suspects: Suspects = ()  # what it computes
    holds_state: bool = True  # if it was started to join: whether it was given all of the state


@dataclass(frozen=True)
class Now:
    """The activity of a rank, for monitoring."""

    doing: str
    seconds: float  # since it began
    step: int  # 0: between steps
    slots: tuple[int, ...] = ()  # that it computes
