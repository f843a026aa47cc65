"""Sources of text: files, directories, JSONL, the standard library of this Python, a dataset of the hub.

A source yields pieces: stretches of UTF-8 that fit into memory, the last of each document marked.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

_PIECE = 1 << 20
TOKEN_FILES = (".npy", ".bin")
_PASSED_OVER = {"__pycache__", "site-packages", "dist-packages"}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


class Piece(NamedTuple):
    text: bytes
    last: bool  # of its document
    where: str


class Source(Protocol):
    name: str
    limit: int | None  # the most tokens that are taken

    def identity(self) -> Any:
        """The key of a cache of its tokens, as JSON."""

    def pieces(self) -> Iterator[Piece]: ...


class Files:
    """Text files and JSONL, one after another. A text file is one document, and so is each line of JSONL."""

    limit: int | None = None

    def __init__(self, name: str, files: list[Path]) -> None:
        self.name, self.files = name, files

    def identity(self) -> Any:
        stats = [(file, file.stat()) for file in self.files]
        return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats]

    def pieces(self) -> Iterator[Piece]:
        for file in self.files:
            yield from _json_lines(file) if file.suffix == ".jsonl" else _text(file)


def _text(path: Path) -> Iterator[Piece]:
    """Cut after a line's end, so that neither a character nor, as a rule, a token is cut in two."""
    with path.open("rb") as file:
        piece = file.read(_PIECE) + file.readline()
        while piece:
            following = file.read(_PIECE) + file.readline()
            yield Piece(piece, not following, str(path))
            piece = following


def _json_lines(path: Path) -> Iterator[Piece]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            where = f"{path}, line {number}"
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise ValueError(f'{where} is not a JSON object with a string under "text"; fix or remove it')
            yield Piece(text.encode(errors="replace"), True, where)


class Hub:
    """`hf:NAME[:CONFIG][@TOKENS]`: the train split of a dataset, read as a stream, up to this many tokens."""

    def __init__(self, path: str) -> None:
        match = re.fullmatch(r"hf:([^:@]+)(?::([^:@]+))?(?:@(\d+)([KMB]?))?", path)
        if not match:
            raise ValueError(
                f"data.path={path!r} is not hf:NAME[:CONFIG][@TOKENS]; write for example hf:allenai/c4:en@200M"
            )
        if importlib.util.find_spec("datasets") is None:
            raise ValueError(
                f"data.path={path!r} needs the datasets library; pip install 'recover-train[datasets]', or name a "
                "local file"
            )
        self.name = path
        self.dataset, self.config, tokens, unit = match.groups()
        self.limit: int | None = int(tokens) * _UNITS[unit] if tokens else 100 * 10**6

    def identity(self) -> Any:
        return self.name

    def pieces(self) -> Iterator[Piece]:
        from datasets import load_dataset

        try:
            for row in load_dataset(self.dataset, self.config, split="train", streaming=True):
                yield Piece(row["text"].encode(errors="replace"), True, self.name)
        except Exception as error:  # from the network, the hub, or any file format
            raise ValueError(
                f"data.path={self.name!r} cannot be read ({type(error).__name__}: {error}); "
                "check the name, the network, and that its train split has a column 'text'"
            ) from error


def find_source(path: str | None) -> Source:
    if path is None:
        return _standard_library()
    if path.startswith("hf:"):
        return Hub(path)
    root = Path(path)
    if not root.exists():
        raise ValueError(
            f"data.path={path!r} does not exist; name a text, JSONL, .npy or .bin file, a directory, or hf:NAME"
        )
    files = _below(root) if root.is_dir() else [root]
    if not files:
        raise ValueError(f"data.path={path!r} is a directory without files; put text files into it")
    for file in files:
        if file.suffix in TOKEN_FILES:  # token files are mapped one at a time
            raise ValueError(
                f"data.path={path!r} holds the token file {file.name}; name that file itself instead"
            )
    return Files(path, files)


def _standard_library() -> Files:
    files = [file for file in _below(Path(sysconfig.get_paths()["stdlib"])) if file.suffix == ".py"]
    return Files(f"the standard library of Python {platform.python_version()}", files)


def _below(root: Path) -> list[Path]:
    """Files below a directory, without hidden and installed ones, in an order that does not depend on the machine."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _PASSED_OVER]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(filter(Path.is_file, found), key=lambda file: file.relative_to(root).parts)
