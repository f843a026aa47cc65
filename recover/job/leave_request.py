"""Requests that a host leaves a running job, which continues on other hosts: from the agent of the host
to its ranks, and from an operator to the agent."""

from __future__ import annotations

from pathlib import Path

from recover.job.record_files import FILES
from recover.job.stop_request import SessionRequest

_ASKED = "leave"


class LeaveRequest(SessionRequest):
    """To the ranks of one host."""

    def __init__(self, session: str | Path | None) -> None:
        super().__init__(session, _ASKED)


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
