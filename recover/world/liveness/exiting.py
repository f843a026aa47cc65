"""Ranks of this host whose processes the kernel is ending.

A process executes nothing any more once all of its threads are in the kernel's exit path. Its parent
learns of the end only after the kernel has freed the memory of the process: 50 to 100 ms later for a
process that has imported torch, and later still if it holds a GPU (docs/log.md). The other ranks need
not wait for that.
"""

from __future__ import annotations

import os

from recover.world.liveness.board import Board

# Seconds without a heartbeat (a rank beats every 5 ms) after which a process is looked up. Looking up a
# process that lives takes 20 microseconds, so it is not done for every rank in every pass.
QUIET = 0.012
_PF_EXITING = 0x4  # of the flags in /proc/PID/stat: the thread is in the exit path, and never leaves it
_FLAGS, _STARTED, _EXIT_CODE = 6, 19, 49  # fields of /proc/PID/stat, counted from the state of the process


class ExitingRanks:
    """Finds each exiting rank of a board once. `me`: this rank, if it has a row there."""

    def __init__(self, board: Board, me: int = -1) -> None:
        self._board, self._me = board, me
        self._found: set[int] = set()
        self._looked: dict[int, tuple[int, float]] = {}  # by rank: its heartbeat, and when that was looked at

    def look(self, now: float) -> list[int]:
        """The ranks that were found in this pass; their processes are exiting, or gone."""
        found = []
        rows = self._board.heartbeats()
        for rank in self._looked.keys() - rows.keys():  # its row was cleared
            del self._looked[rank]
            self._found.discard(rank)
        for rank, beat in rows.items():
            if rank == self._me or rank in self._found:
                continue
            last, since = self._looked.get(rank, (-1, now))
            if beat == last and now - since < QUIET:
                continue
            self._looked[rank] = beat, now
            if beat == last and is_exiting(*self._board.process(rank)):
                found.append(rank)
        self._found.update(found)
        return found


def is_exiting(pid: int, started: int) -> bool:
    """Whether the process that started then executes nothing any more: all of its threads are in the exit
    path, or it is gone."""
    leader = _stat(f"/proc/{pid}/stat")
    if leader is None or int(leader[_STARTED]) != started:
        return True
    if not int(leader[_FLAGS]) & _PF_EXITING:
        return False
    # The main thread may end alone. A thread that is not exiting yet may start another one between the two
    # lists; once all threads of the first list are exiting, no thread is started any more.
    threads = _threads(pid)
    for thread in threads:
        fields = _stat(f"/proc/{pid}/task/{thread}/stat")
        if fields is not None and not int(fields[_FLAGS]) & _PF_EXITING:
            return False
    return _threads(pid) <= threads


def exit_code(pid: int) -> int:
    """The exit code of an exiting process, as `subprocess` has it; 0 if it is not known."""
    fields = _stat(f"/proc/{pid}/stat")
    return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE])) if fields else 0


def _threads(pid: int) -> set[str]:
    try:
        return set(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return set()


def _stat(path: str) -> list[str] | None:
    """The fields of a process or thread from its state on; None if it is gone."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(4096).decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
