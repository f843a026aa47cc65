"""The loss on data that is never trained on."""

from __future__ import annotations

from recover.data import Stream
from recover.train.engine import Engine


def heldout_loss(engine: Engine, heldout: Stream, batches: int) -> float:
    """The mean over so many microbatches. Every replica computes it: none has to wait for another, or miss it."""
    first = range(min(batches, len(heldout)))
    return sum(engine.loss(heldout[index]) for index in first) / len(first)
