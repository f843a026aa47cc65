"""Requests that a host leaves a job which goes on on others: from the agent of the host to its ranks, and
from an operator to the agent."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from recover.job.record_files import FILES

_ASKED = "leave"


class LeaveRequest:
    """To the ranks of one host: a file in its session, which is in memory and never full.

    `session`: None for a rank without a launcher of ours, which is never asked.
    """

    def __init__(self, session: str | Path | None) -> None:
        self._asked = Path(session, _ASKED) if session else None

    def ask(self) -> None:
        if self._asked is not None:
            with suppress(OSError):  # the session has ended meanwhile
                self._asked.touch()

    @property
    def is_asked(self) -> bool:
        return self._asked is not None and self._asked.exists()


class OperatorRequest:
    """To the agent of a host: a file in the run directory. It is empty until the agent has answered."""

    def __init__(self, run_dir: Path, host: str) -> None:
        self._path = run_dir / _ASKED / host

    def ask(self) -> None:
        """Raises OSError."""
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_bytes(b"")

    @property
    def is_asked(self) -> bool:
        return FILES.read(self._path) == b""

    def answer(self, text: str) -> None:
        FILES.replace(self._path, text.encode())

    def answered(self) -> str:
        """The answer of the agent; "" if there is none yet."""
        return (FILES.read(self._path) or b"").decode(errors="replace")

    def withdraw(self) -> None:
        FILES.remove(self._path)
