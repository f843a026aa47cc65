"""Requests that a host leaves a running job, which continues on other hosts: from the agent of the host
to its ranks, and from an operator to the agent."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from recover.job.record_files import FILES
from recover.job.stop_request import SessionRequest

_ASKED, _AGREED, _ALL = "leave", "leave-agreed", "leave-all"


class AllLeaveRequest(SessionRequest):
    """Request to the ranks of one host: all hosts were asked to leave, so that the job ends."""

    def __init__(self, session: str | Path | None) -> None:
        super().__init__(session, _ALL)


class LeaveRequest(SessionRequest):
    """Request to the ranks of one host: leave the job after a step."""

    def __init__(self, session: str | Path | None) -> None:
        super().__init__(session, _ASKED)
        self._agreed = Path(session, _AGREED) if session else None
        self._noted = False

    def note_agreement(self) -> None:
        """Note that all ranks have agreed in a commit that those of this host leave, or that all stop."""
        if self._agreed is not None:
            with suppress(OSError):  # the session has ended meanwhile
                self._agreed.touch()
                self._noted = True

    def forget_agreement(self) -> None:
        """Remove that note: the script of this rank takes another step instead."""
        if self._agreed is not None and self._noted:
            self._noted = False
            with suppress(OSError):
                self._agreed.unlink(missing_ok=True)

    @property
    def is_agreed(self) -> bool:
        """Whether the ranks of this host are on their way out, and do not take another step."""
        return self._agreed is not None and self._agreed.exists()


LEFT = "left"  # the last answer of an agent, which stays until an agent of this host is started again


class OperatorRequest:
    """Request to the agent of a host, as a file in the run directory. It is empty until the agent
    has answered."""

    def __init__(self, run_dir: Path, host: str) -> None:
        self._path = run_dir / _ASKED / host

    def ask(self) -> None:
        """Make the request. Raises OSError."""
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

    @property
    def is_withdrawn(self) -> bool:
        """Whether there is neither a request nor an answer."""
        return FILES.read(self._path) is None

    def withdraw(self) -> None:
        FILES.remove(self._path)
