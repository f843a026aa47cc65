"""Requests to stop a job after its current step, from its launcher (or the agent of a host) to the
ranks of the same host: files in the session, which is in memory and never full.

A script handles requests if it reads `step.stop_agreed`. The launcher asks only then: a script that
does not would train on.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_ASKED, _HEEDED = "stop", "heeds-stop"


class SessionRequest:
    """A request to the ranks of one host: the file `name` in their session.

    `session`: None for a rank without a launcher of ours, which is never asked.
    """

    def __init__(self, session: str | Path | None, name: str) -> None:
        self._asked = Path(session, name) if session else None

    def ask(self) -> None:
        """Make the request. A signal handler may call this."""
        if self._asked is not None:
            with suppress(OSError):  # the session has ended meanwhile
                self._asked.touch()

    @property
    def is_asked(self) -> bool:
        return self._asked is not None and self._asked.exists()


class StopRequest(SessionRequest):
    def __init__(self, session: str | Path | None) -> None:
        super().__init__(session, _ASKED)
        self._heeded = Path(session, _HEEDED) if session else None
        self._noted = False

    def heed(self) -> None:
        """Note, once, that the script of this rank looks for requests."""
        if self._heeded is not None and not self._noted:
            self._noted = True
            with suppress(OSError):
                self._heeded.touch()

    @property
    def is_heeded(self) -> bool:
        return self._heeded is not None and self._heeded.exists()
