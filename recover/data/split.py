"""Number of sequences for training and of held-out ones."""

from __future__ import annotations

import math


def train_and_heldout(sequences: int, microbatch_size: int, fraction: float) -> tuple[int, int]:
    """The numbers of sequences for training, and of held-out ones: at least one microbatch, unless the
    fraction is 0."""
    if not 0 <= fraction < 1:
        raise ValueError(f"heldout_fraction={fraction} is no part of a corpus; choose one from 0 to below 1")
    heldout = max(math.ceil(sequences * fraction), microbatch_size) if fraction else 0
    return max(sequences - heldout, 0), min(heldout, sequences)
