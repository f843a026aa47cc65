"""Imports of much that stays: torch alone makes some hundred thousand objects, and none of them is
ever garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """The garbage collector does not look through what is imported inside: not while it grows, and
    never later.

    That is a sixth of the time of the imports, and half of that in which the interpreter ends.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
