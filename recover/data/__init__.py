"""Corpora, tokens, and the stream that turns a sample index into a microbatch. docs/guides/data.md lists the formats.

Neither opening nor checking a corpus imports torch; only looking a microbatch up does.
"""

from recover.data.corpus import Corpus, check_corpus, open_corpus
from recover.data.stream import Split, Stream, open_stream

__all__ = ["Corpus", "Split", "Stream", "check_corpus", "open_corpus", "open_stream"]
