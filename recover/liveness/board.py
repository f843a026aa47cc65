"""The progress board: one line of counters per rank, in memory that every process of the host can read.

It is written without any communication library, so it still tells the truth when communication is stuck.
The launcher reads it to see whether a job makes progress; a rank reads it to see whether it is the one
that an agreement has forgotten.
"""

from __future__ import annotations

import errno
import mmap
import os
import signal
from pathlib import Path

import numpy as np

from recover.world.watchdog import Sign

PID, STARTED, JOINED, ENTERED, FINISHED, ARRIVED, ACTIVITY, VOTES, STEP, HEARTBEAT = range(10)
ENDED = -1  # in the column of steps: the script has ended
_COLUMNS = 16  # two cache lines per rank, so that writers do not disturb each other


class Board:
    """A table of `size` ranks by a few 64-bit counters; each rank writes its own row only."""

    def __init__(self, path: Path, size: int) -> None:
        nbytes = size * _COLUMNS * 8
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise PermissionError(
                f"{path} is a link, and no rank of this job has made it; remove it"
            ) from None
        try:
            if os.fstat(fd).st_size < nbytes:
                os.ftruncate(fd, nbytes)  # idempotent: whoever comes first makes room, filled with zeros
            self._memory = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self.size = size
        self._table = np.frombuffer(self._memory, dtype=np.int64).reshape(size, _COLUMNS)

    def claim(self, rank: int) -> None:
        """Write this process's pid into its row: from here on the launcher can ask it for its stack."""
        me = os.getpid(), start_time(os.getpid())
        if (self._table[rank, PID], self._table[rank, STARTED]) != me:
            self._table[rank] = 0  # whatever a process before has counted says nothing of this one
        self._table[rank, STARTED] = me[1]
        self._table[rank, PID] = me[0]

    def pid(self, rank: int) -> int:
        """The pid of a rank on this host while it lives, otherwise 0."""
        pid = int(self._table[rank, PID])
        # A pid is used again by strangers once its process is gone; the time of its start is not.
        return pid if pid and start_time(pid) == self._table[rank, STARTED] else 0

    def kill(self, rank: int) -> None:
        """SIGKILL a rank of this host, if it still lives."""
        if pid := self.pid(rank):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # another peer was faster

    def join(self, rank: int) -> None:
        """MPI is up on this rank, and so it is on all others, or will be."""
        self._table[rank, JOINED] = 1

    def joined(self, rank: int) -> bool:
        return bool(self._table[rank, JOINED])

    def enter(self, rank: int, agreement: int) -> None:
        """This rank is about to take part in agreement number `agreement`."""
        self._table[rank, ENTERED] = agreement

    def entered(self, rank: int) -> int:
        return int(self._table[rank, ENTERED])

    def arrive(self, rank: int, operation: int) -> None:
        """This rank is about to take part in operation number `operation` of its cross-replica group."""
        self._table[rank, ARRIVED] = operation

    def arrived(self, rank: int) -> int:
        return int(self._table[rank, ARRIVED])

    def is_here(self, rank: int) -> bool:
        """Whether a rank writes to this board; those of other hosts have boards of their own."""
        return bool(self._table[rank, PID])

    def finish(self, rank: int, agreement: int) -> None:
        """This rank holds the result of agreement number `agreement`."""
        self._table[rank, FINISHED] = agreement

    def touch(self, rank: int) -> None:
        """Something was accomplished; any change counts as progress."""
        self._table[rank, ACTIVITY] += 1

    def come_to_vote(self, rank: int) -> None:
        """This rank has done its part, and waits for the others."""
        self._table[rank, VOTES] += 1

    def in_step(self, rank: int, step: int) -> None:
        """This rank is inside this step now; 0: between two steps, where it may do whatever it likes."""
        self._table[rank, STEP] = step

    def step(self, rank: int) -> int:
        """The step that a rank is inside of, 0, or ENDED."""
        return int(self._table[rank, STEP])

    def on_its_way(self, rank: int, agreement: int) -> bool:
        """Whether a rank of this host lives and has neither ended nor gone beyond this agreement."""
        return self.step(rank) != ENDED and self.entered(rank) <= agreement and bool(self.pid(rank))

    def beat(self, rank: int) -> None:
        """This process runs: its watcher does."""
        self._table[rank, HEARTBEAT] += 1

    def signs_of_life(self, me: int) -> dict[int, Sign]:
        """What the other ranks of this host show of themselves, as far as they have joined the world and live."""
        rows = self._table.tolist()
        mine = rows[me]
        return {
            rank: Sign(
                heartbeat=row[HEARTBEAT],
                progress=tuple(row[ENTERED:HEARTBEAT]),
                late=0 < row[STEP] == mine[STEP]
                and (row[VOTES], row[ENTERED]) < (mine[VOTES], mine[ENTERED]),
            )
            for rank, row in enumerate(rows)
            if rank != me and row[HEARTBEAT] and self.pid(rank)
        }

    def finished(self, rank: int) -> int:
        return int(self._table[rank, FINISHED])

    def held_by_others(self, agreement: int) -> bool:
        """Whether a living rank of this host holds the result of an agreement. What only the dead held is gone."""
        if int(self._table[:, FINISHED].max()) < agreement:  # nearly always: the living need not be looked up
            return False
        return any(self._table[rank, FINISHED] >= agreement and self.pid(rank) for rank in range(self.size))

    def snapshot(self) -> bytes:
        """All counters of what was done; two equal snapshots mean that nothing happened in between."""
        return self._table[:, :HEARTBEAT].tobytes()


def start_time(pid: int) -> int:
    """When a process started, in ticks since boot; 0 if there is none (or only its zombie)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
