"""Keeps a loop that watches a job alive: an exception costs one pass of one part, and is reported
once."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from recover.job.output import say

_MOST = 20  # different failures that are reported


class SupervisorError(Exception):
    """An essential part of a supervisor has failed for too long."""


class Supervised:
    """Runs the parts of a loop: a part that raises does not keep the others from running.

    `patience`: seconds that an `essential` part may fail in every pass before SupervisorError is
    raised. The host must then end in a way that the other hosts see.
    """

    def __init__(self, name: str, patience: float = 20.0) -> None:
        self._name, self._patience = name, patience
        self._failing: dict[str, float] = {}  # parts, since when
        self._told: set[str] = set()

    @contextmanager
    def part(self, what: str, essential: bool = False) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            now = time.monotonic()
            since = self._failing.setdefault(what, now)
            if (
                text := f"{self._name} could not {what}: {type(error).__name__}: {error}"
            ) not in self._told and len(self._told) < _MOST:
                self._told.add(text)
                say(f"{text}; it goes on\n{traceback.format_exc().rstrip()}")
            if essential and now - since > self._patience:
                raise SupervisorError(f"{text}, for {self._patience:g} s") from error
        else:
            self._failing.pop(what, None)
