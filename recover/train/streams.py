"""The data that a configuration names: for training, and held out."""

from __future__ import annotations

from recover.data import Stream, open_stream
from recover.train.config import Config


def open_streams(config: Config) -> tuple[Stream, Stream]:
    """Returns the training data and the held-out data."""
    corpus = config.data.path, config.tokenizer, config.seq_len, config.microbatch_size, config.seed
    return (
        open_stream(*corpus, "train", config.eval.fraction),
        open_stream(*corpus, "heldout", config.eval.fraction),
    )
