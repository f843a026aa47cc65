"""The state before a step that may never end: saved when all hosts are asked to leave."""

from __future__ import annotations

import threading
from collections.abc import Callable

_LOOK = 0.5  # seconds between looks for the request


class LastState:
    """Looks for a request on a thread, because the main thread may compute, or wait for another rank, for as long as
    the step takes.

    is_asked:  whether all hosts were asked to leave
    is_over:   whether all ranks have agreed to stop: they save the newest state themselves
    save:      saves the state of the last commit. Returns False if a commit was under way
    """

    def __init__(
        self, is_asked: Callable[[], bool], is_over: Callable[[], bool], save: Callable[[], bool]
    ) -> None:
        self._is_asked, self._is_over, self._save = is_asked, is_over, save
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="recover-last-state", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when nothing is being saved any more."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def look(self) -> bool:
        """Returns whether there is nothing left to do."""
        return self._is_asked() and (self._is_over() or self._save())

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK):
            if self.look():
                return
