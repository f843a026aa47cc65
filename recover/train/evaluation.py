"""The loss on held-out data."""

from __future__ import annotations

from recover.data import Stream
from recover.train.engine import Engine


def heldout_loss(engine: Engine, heldout: Stream, batches: int) -> float:
    """The mean over the first `batches` microbatches. Every replica computes it, so that none waits for another."""
    first = range(min(batches, len(heldout)))
    return sum(engine.loss(heldout[index]) for index in first) / len(first)
