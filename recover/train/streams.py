"""The data that a configuration names: what is trained on, and what is held out."""

from __future__ import annotations

from recover.data import Stream, open_stream
from recover.train.config import Config


def open_streams(config: Config) -> tuple[Stream, Stream]:
    """Training data, held-out data."""
    corpus = config.data.path, config.tokenizer, config.seq_len, config.microbatch_size, config.seed
    return (
        open_stream(*corpus, "train", config.eval.fraction),
        open_stream(*corpus, "heldout", config.eval.fraction),
    )
