"""What a rank shows of itself to the others."""

from __future__ import annotations

from dataclasses import dataclass

Suspects = tuple[tuple[int, int], ...]  # slots, and the samples that they stand for


@dataclass(frozen=True)
class Sign:
    """What a rank shows of itself on the board."""

    heartbeat: int
    progress: tuple[int, ...]
    late: bool  # it is in the step that this rank is in, this rank has voted, and nobody has come less far than it
    stopped: bool = False  # as the kernel says: by a signal, or by a debugger
    step: int = 0
    suspects: Suspects = ()  # what it computes just now


@dataclass(frozen=True)
class Now:
    """What a rank does just now, for whoever looks on."""

    doing: str
    seconds: float  # for so long
    step: int  # that it is inside of; 0: none
    slots: tuple[int, ...] = ()  # that it computes
