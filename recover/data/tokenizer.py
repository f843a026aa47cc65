"""From text to token ids: bytes, or a file of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recover.job.optional_packages import need

Tokens = NDArray[np.integer[Any]]
_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<eos>", "</s>", "[EOS]", "[SEP]")


class Tokenizer(Protocol):
    name: str  # for people
    identity: str  # what a cache of its tokens depends on
    vocab: int
    end: int | None  # separates documents

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]: ...


class Bytes:
    """Makes a token of every byte. Text holds no byte 0, which separates documents."""

    name = identity = "bytes"
    vocab = 256
    end: int | None = 0

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        return [np.frombuffer(text, np.uint8) for text in texts]


class FromFile:
    """A `tokenizer.json`. Its end-of-text token separates documents, if it has one of the usual names."""

    def __init__(self, path: str) -> None:
        need("tokenizers", f"tokenizer={path!r}", "tokenizer=bytes")
        from tokenizers import Tokenizer as Library

        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(
                f"tokenizer={path!r} cannot be read ({error.strerror}); "
                "write 'bytes', or the path of a tokenizer.json"
            ) from None
        try:
            self._library = Library.from_buffer(content)
        except Exception as error:  # the library raises plain Exception, and ValueError in some versions
            raise ValueError(
                f"tokenizer={path!r} is not a file of the tokenizers library ({error}); "
                "save one with Tokenizer.save, or take a model's tokenizer.json"
            ) from None
        self.name = path
        self.identity = sha256(content).hexdigest()
        ids = self._library.get_vocab()
        # Ids may have gaps; the model needs a row for the last one.
        self.vocab = max(ids.values(), default=-1) + 1
        self.end: int | None = next((ids[name] for name in _ENDS_OF_TEXT if name in ids), None)

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        batch = self._library.encode_batch([text.decode() for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in batch]


def get_tokenizer(name: str) -> Tokenizer:
    return Bytes() if name == "bytes" else FromFile(name)
