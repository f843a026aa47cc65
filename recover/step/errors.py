"""Why a step cannot go on, on all replicas alike."""

from __future__ import annotations


class StateDivergedError(RuntimeError):
    """Replicas hold different parameters, and there is no majority to tell which are right."""
