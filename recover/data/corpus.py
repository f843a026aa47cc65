"""A corpus is one long memory-mapped row of token ids, made from any of the supported formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from recover.data.cache import cached
from recover.data.sources import TOKEN_FILES, Hub, Piece, Source, find_source
from recover.data.split import train_and_heldout
from recover.data.tokenizer import Bytes, Tokenizer, Tokens, get_tokenizer

_BATCH = 64  # pieces that are encoded together, in parallel if the library can
_LOOK = 1 << 24  # tokens of a token file that are checked before the start; the rest when they are used


@dataclass(frozen=True)
class Corpus:
    tokens: Tokens
    vocab: int
    name: str
    tokenizer: str


def open_corpus(path: str | None, tokenizer: str) -> Corpus:
    """Open a corpus. Text is tokenised into the cache first, unless this machine has done so before."""
    coder = get_tokenizer(tokenizer)
    tokens, name = _in_place(path, coder), path
    if tokens is None:
        source, dtype = find_source(path), _smallest(coder.vocab)
        name = source.name
        file = cached([source.identity(), coder.identity], name, dtype, _encode(source, coder))
        if not file.stat().st_size:
            raise ValueError(_empty(name))
        tokens = np.memmap(file, dtype, mode="r")
    return Corpus(tokens, coder.vocab, str(name), coder.name)


def check_corpus(
    path: str | None,
    tokenizer: str,
    seq_len: int,
    microbatch_size: int,
    global_batch: int,
    heldout_fraction: float = 0.02,
) -> None:
    """Raise ValueError if one step could not be trained on this corpus. Reads no more than necessary; for a dataset
    of the hub only its name and the library are checked."""
    coder = get_tokenizer(tokenizer)

    def enough(tokens: int) -> bool:
        train, _ = train_and_heldout(tokens // (seq_len + 1), microbatch_size, heldout_fraction)
        return train // microbatch_size >= global_batch

    mapped, name = _in_place(path, coder), path
    if mapped is not None:
        found = len(mapped)
    else:
        source = find_source(path)
        if isinstance(source, Hub):
            return
        name, found = source.name, 0
        for tokens in _encode(source, coder):
            found += len(tokens)
            if enough(found):
                return
        if not found:
            raise ValueError(_empty(name))
    if not enough(found):
        raise ValueError(
            f"the corpus {name} holds {found:,} tokens ({coder.name}), too few for one step of {global_batch} "
            f"microbatches of {microbatch_size} x {seq_len} tokens besides what is held out; use more text, or lower "
            "seq_len, microbatch_size or accum"
        )


def _encode(source: Source, coder: Tokenizer) -> Iterator[Tokens]:
    end = None if coder.end is None else np.array([coder.end], _smallest(coder.vocab))
    pieces, taken = source.pieces(), 0
    try:
        while batch := list(islice(pieces, _BATCH)):
            try:
                encoded = coder.encode([piece.text for piece in batch])
            except UnicodeDecodeError:
                raise ValueError(_not_text(batch)) from None
            for piece, tokens in zip(batch, encoded, strict=True):
                yield tokens
                taken += len(tokens)
                if piece.last and end is not None:
                    yield end
                if source.limit is not None and taken >= source.limit:
                    return
    except OSError as error:
        raise ValueError(_unreadable(error.filename or source.name, error)) from error


def _not_text(batch: list[Piece]) -> str:
    for piece in batch:
        try:
            piece.text.decode()
        except UnicodeDecodeError as error:
            return (
                f"{piece.where} is not UTF-8 text ({error.reason}); fix or remove it, or use tokenizer=bytes"
            )
    raise AssertionError("one of the pieces did not decode")


def _in_place(path: str | None, coder: Tokenizer) -> Tokens | None:
    """Files of tokens, and plain files read as bytes, are mapped without a copy."""
    if path is None or path.startswith("hf:"):
        return None
    file = Path(path)
    if file.suffix in TOKEN_FILES:
        return _token_file(file, coder)
    if not isinstance(coder, Bytes) or file.suffix == ".jsonl" or not file.is_file():
        return None
    try:
        return np.memmap(file, np.uint8, mode="r")
    except (OSError, ValueError) as error:  # numpy's ValueError: nothing to map
        raise ValueError(_empty(path) if not file.stat().st_size else _unreadable(path, error)) from None


def _token_file(path: Path, coder: Tokenizer) -> Tokens:
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r")
        else:
            dtype = _bin_dtype(path)
            if path.stat().st_size % dtype.itemsize:
                raise ValueError(f"its size is no multiple of {dtype.itemsize} bytes, one {dtype}")
            tokens = np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
    except FileNotFoundError:
        raise ValueError(f"data.path={str(path)!r} does not exist; name an existing file of tokens") from None
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"data.path={str(path)!r} is not a {path.suffix} file of tokens ({error}); write it again"
        ) from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"data.path={str(path)!r} holds {tokens.dtype} of shape {tokens.shape}, not one row of integers; "
            "save the token ids as one flat array"
        )
    if not len(tokens):
        raise ValueError(_empty(str(path)))
    check_ids(tokens[:: -(-len(tokens) // _LOOK)], coder.vocab, str(path), coder.name)
    return tokens


def _bin_dtype(path: Path) -> np.dtype[Any]:
    """uint16, unless NAME.bin.json next to it says {"dtype": "uint32"} or another."""
    sidecar = path.with_name(path.name + ".json")
    if not sidecar.exists():
        return np.dtype(np.uint16)
    try:
        return np.dtype(json.loads(sidecar.read_text())["dtype"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{sidecar} must be like {{"dtype": "uint32"}}: {error}') from None


def check_ids(tokens: Tokens, vocab: int, name: str, tokenizer: str) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab:
        raise ValueError(
            f"the corpus {name} holds the token id {low if low < 0 else high}, but tokenizer={tokenizer!r} ends at "
            f"{vocab - 1}; name the tokenizer that the file was made with"
        )


def _smallest(vocab: int) -> np.dtype[Any]:
    return np.min_scalar_type(max(vocab - 1, 0))


def _unreadable(name: str, error: Exception) -> str:
    return f"{name} cannot be read ({error}); fix it, or set data.path to other text"


def _empty(name: str) -> str:
    return f"the corpus {name} is empty; let data.path name one with text in it"
