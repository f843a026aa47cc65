"""The token cache: text is tokenised once per machine. The first process does it, the others wait and map the same
file.

The files are in $RECOVER_CACHE, or in `recover` under $XDG_CACHE_HOME or ~/.cache, named by a digest of everything
that they depend on. They are renamed into place when complete. The lock belongs to the kernel, so that another
process continues if the builder dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from recover.data.tokenizer import Tokens

_VERSION = 1  # version of the tokenisation; a new one does not touch old files
_PATIENCE = 3.0  # seconds without a message


def directory() -> Path:
    if chosen := os.environ.get("RECOVER_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recover"


def cached(identity: Any, name: str, dtype: DTypeLike, build: Iterator[Tokens]) -> Path:
    """The file with these tokens; `build` makes it if it does not exist."""
    key = sha256(json.dumps([_VERSION, identity]).encode()).hexdigest()[:32]
    path = directory() / f"{key}.{np.dtype(dtype).name}"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _write(path, name, dtype, build)
    except OSError as error:
        raise ValueError(
            f"cannot keep the tokens of {name} in {path.parent} ({error.strerror or error}); "
            "make room there, or set RECOVER_CACHE to a directory that can be written"
        ) from error
    return path


def _write(path: Path, name: str, dtype: DTypeLike, build: Iterator[Tokens]) -> None:
    """Only the holder of the lock calls this, so one name for the unfinished file is enough."""
    unfinished, announced = path.with_suffix(".tmp"), time.monotonic() + _PATIENCE
    try:
        with unfinished.open("wb") as file:
            for tokens in build:
                file.write(tokens.astype(dtype, copy=False).tobytes())
                if time.monotonic() > announced:
                    print(f"recover: tokenising {name}, once, into {path}", file=sys.stderr, flush=True)
                    announced = float("inf")
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
