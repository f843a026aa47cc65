"""Ranks of this host whose processes the kernel is ending.

A process executes nothing any more once all of its threads are in the kernel's exit path. Its parent
learns of the end only after the kernel has freed the memory of the process: about 100 ms later for a
process that has imported torch, on two busy cores (docs/log.md). The other ranks need not wait for that.

A wrong answer would cost a healthy rank, so only positive evidence counts. A process that cannot be
looked up (no descriptor left, `hidepid`, another PID namespace) may be alive: mpirun or the agent
reports its end.
"""

from __future__ import annotations

import os

from recover.world.liveness.board import Board

# Seconds without a heartbeat (a rank beats every 5 ms) after which a process is looked up. Looking up a
# process that lives takes 20 microseconds, so it is not done for every rank in every pass.
QUIET = 0.012
_PF_EXITING = 0x4  # of the flags in /proc/PID/stat: the thread is in the exit path, and never leaves it
_FLAGS, _STARTED, _EXIT_CODE = 6, 19, 49  # fields of /proc/PID/stat, counted from the state of the process
_GONE = (FileNotFoundError, ProcessLookupError)


class ExitingRanks:
    """Finds each exiting rank of a board once. `me`: this rank, if it has a row there."""

    def __init__(self, board: Board, me: int = -1) -> None:
        self._board, self._me = board, me
        self._found: set[int] = set()
        self._looked: dict[int, tuple[int, float]] = {}  # by rank: its heartbeat, and when that was looked at

    def look(self, now: float) -> list[int]:
        """The ranks that were found in this pass: their processes are exiting."""
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
    path. False if it is gone, or cannot be looked up."""
    try:
        leader = _stat(f"/proc/{pid}/stat")
        if int(leader[_STARTED]) != started or not int(leader[_FLAGS]) & _PF_EXITING:
            return False
        # The main thread may end alone. A thread that is not exiting yet may start another one between the
        # two lists; once all threads of the first list are exiting, no thread is started any more.
        threads = os.listdir(f"/proc/{pid}/task")
        return all(_thread_is_exiting(pid, thread) for thread in threads) and set(threads).issuperset(
            os.listdir(f"/proc/{pid}/task")
        )
    except OSError:
        return False


def exit_code(pid: int) -> int:
    """The exit code of an exiting process, as `subprocess` has it; 0 if it is not known."""
    try:
        return os.waitstatus_to_exitcode(int(_stat(f"/proc/{pid}/stat")[_EXIT_CODE]))
    except OSError:
        return 0


def _thread_is_exiting(pid: int, thread: str) -> bool:
    try:
        return bool(int(_stat(f"/proc/{pid}/task/{thread}/stat")[_FLAGS]) & _PF_EXITING)
    except _GONE:
        return True


def _stat(path: str) -> list[str]:
    """The fields of a process or thread, from its state on."""
    with open(path, "rb", buffering=0) as file:
        fields = file.read(4096).decode(errors="replace").rpartition(")")[2].split()
    if len(fields) <= _EXIT_CODE:
        raise ProcessLookupError(path)
    return fields
