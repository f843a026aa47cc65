"""Text is turned into tokens once per machine: the first process does it, the others wait and map the same file.

The files lie in $RECOVER_CACHE, or `recover` under $XDG_CACHE_HOME or ~/.cache, named after a digest of all that they
depend on. They are renamed into place when whole; the lock is the kernel's, so when a builder dies the next one builds.
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

_VERSION = 1  # of the way from text to tokens; a new one leaves the old files alone
_PATIENCE = 3.0  # seconds without a word


def directory() -> Path:
    if chosen := os.environ.get("RECOVER_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recover"


def cached(identity: Any, name: str, dtype: DTypeLike, build: Iterator[Tokens]) -> Path:
    """The file with these tokens, made from `build` if it is not there."""
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
    """Only the holder of the lock is here, so one name for the unfinished file is enough."""
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
