"""The stream: from a sample number to a microbatch, a pure function of the corpus, the seed and the number.

The corpus is cut into sequences of seq_len + 1 tokens that share no token. A fixed scatter selects the held-out ones,
the same for every seed; each pass over the others is shuffled by (seed, pass).
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Literal

import numpy as np

from recover.data.corpus import Corpus, check_ids, open_corpus
from recover.data.shuffle import Shuffle
from recover.data.split import train_and_heldout

if TYPE_CHECKING:
    from torch import Tensor

Split = Literal["train", "heldout"]
_PIECES, _PIECE = 256, 1 << 14  # of a corpus, and tokens in each, that are compared between hosts


class Stream:
    """Microbatches of a corpus: `stream[i]` for any i >= 0; after `len(stream)` microbatches the next pass
    begins."""

    def __init__(
        self,
        corpus: Corpus,
        seq_len: int,
        microbatch_size: int,
        seed: int,
        split: Split = "train",
        heldout_fraction: float = 0.02,
    ) -> None:
        sequences = len(corpus.tokens) // (seq_len + 1)
        train, heldout = train_and_heldout(sequences, microbatch_size, heldout_fraction)
        self._offset, self._size = (heldout, train) if split == "train" else (0, heldout)
        if self._size < microbatch_size:
            raise ValueError(
                f"the corpus {corpus.name} has {self._size} sequences of {seq_len} tokens for the {split} split, "
                f"fewer than one microbatch of {microbatch_size}; use more text, a smaller seq_len or "
                "microbatch_size, or another eval.fraction"
            )
        self._corpus, self._seq_len, self._microbatch_size = corpus, seq_len, microbatch_size
        self._seed, self._split = seed, split
        self._scatter = Shuffle(sequences, "split")
        self._pass, self._order = -1, Shuffle(0, "")
        self.vocab = corpus.vocab
        self.description = (
            f"{corpus.name}: {len(corpus.tokens):,} tokens ({corpus.tokenizer}, {corpus.vocab:,} ids), "
            f"{split} split of {self._size:,} sequences"
        )

    def fingerprint(self) -> str:
        """A digest that is equal for the same tokens in the same order. Of large corpora it reads samples from all
        parts."""
        tokens = self._corpus.tokens
        digest = sha256(f"{tokens.dtype} {len(tokens)}".encode())
        for piece in range(_PIECES):
            at = piece * len(tokens) // _PIECES
            digest.update(np.ascontiguousarray(tokens[at : at + _PIECE]).tobytes())
        return f"{self.description} ({digest.hexdigest()[:12]})"

    def __len__(self) -> int:
        return self._size // self._microbatch_size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        import torch

        width = self._seq_len + 1
        rows = np.empty((self._microbatch_size, width), np.int64)
        for row, sequence in zip(rows, self.sequences(index), strict=True):
            row[:] = self._corpus.tokens[sequence * width : (sequence + 1) * width]
        check_ids(rows, self.vocab, self._corpus.name, self._corpus.tokenizer)
        both = torch.from_numpy(rows)
        return {"tokens": both[:, :-1].contiguous(), "targets": both[:, 1:].contiguous()}

    def sequences(self, index: int) -> list[int]:
        """The sequences of the corpus that make up this sample."""
        if index < 0:
            raise IndexError(f"sample {index}: samples are numbered from 0")
        number, position = divmod(index, len(self))
        if number != self._pass:
            self._pass, self._order = number, Shuffle(self._size, f"{self._seed}/{number}")
        first = position * self._microbatch_size
        return [self._scatter[self._offset + self._order[first + i]] for i in range(self._microbatch_size)]


def open_stream(
    path: str | None,
    tokenizer: str,
    seq_len: int,
    microbatch_size: int,
    seed: int,
    split: Split = "train",
    heldout_fraction: float = 0.02,
) -> Stream:
    return Stream(open_corpus(path, tokenizer), seq_len, microbatch_size, seed, split, heldout_fraction)
