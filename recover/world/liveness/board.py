"""The progress board: one row of counters per rank, in memory that every process of the host can
read.

It is written without any communication library, so it is right even when communication is stuck.
The launcher reads from it whether a job makes progress; a rank reads from it whether an agreement
has forgotten it, and which ranks hang.
"""

from __future__ import annotations

import enum
import errno
import mmap
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from recover.job import process
from recover.job.grid import Grid
from recover.world.liveness.signs import Now, Sign, Suspects

# The process, and its permanent progress, for the launcher.
PID, STARTED, JOINED, ACCOMPLISHED = range(4)
# Its position in the protocol, for the other ranks.
ENTERED, FINISHED, ARRIVED, ACTIVITY, VOTES, STEP, HEARTBEAT = range(4, 11)
# What it computes: the first slot (from 1 on; 0: none), the slots after it, as bits, and the
# difference between the numbers of samples and slots.
SLOT, SLOTS, OFFSET = range(11, 14)
# The epoch in which it waits for others (0: it does not), and a count that grows with the data it
# has carried.
WAITS, CARRIED = range(14, 16)
# Its activity, for monitoring (one of DOING), and since when, by the clock that all processes of a
# host share.
DOES, SINCE = range(16, 18)
# Its collective call (0: none), and the position of the call in the order of calls.
CALL, POSITION = range(18, 20)
# 1: its device writes to memory of other ranks, perhaps until its process is gone.
REMOTE_WRITES = 20
DOING = (
    *("starting", "warming up", "preparing", "computing", "reducing"),
    *("voting", "repairing", "updating", "between steps", "ending"),
)
STARTING, WARMING_UP, PREPARING, COMPUTING, REDUCING, VOTING, REPAIRING, UPDATING, BETWEEN, ENDING = range(10)
# Activities that end without other ranks.
AT_WORK = tuple(DOING[what] for what in (PREPARING, COMPUTING, UPDATING, BETWEEN, ENDING))


class ScriptStage(enum.IntEnum):
    """How far a script has come, in the column JOINED."""

    STARTED = 0
    JOINED = 1  # MPI is initialised, or the rank has claimed its row
    WORLD = 2  # it has called `recover.init()`
    STEP = 3  # it has made a `recover.Step`
    STATE = 4  # it has joined a running job, and has been given all of the state


ENDED = -1  # in the column of steps: the script has ended
COLUMNS = 24  # three cache lines per rank, so that writers do not disturb each other
_SHOWN = 62  # slots that fit into the bits


class Board:
    """A table of `size` rows of 64-bit counters; each rank writes its own row only."""

    def __init__(self, path: Path, size: int) -> None:
        nbytes = size * COLUMNS * 8
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
                os.ftruncate(fd, nbytes)  # idempotent: the first process makes room, filled with zeros
            self._memory = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self.size = size
        self._table = np.frombuffer(self._memory, dtype=np.int64).reshape(size, COLUMNS)

    def claim(self, rank: int) -> None:
        """Write this process's pid into its row.

        The launcher can ask it for its stack afterwards.
        """
        me = os.getpid(), start_time(os.getpid())
        if (self._table[rank, PID], self._table[rank, STARTED]) != me:
            self._table[rank] = 0  # counts of an earlier process say nothing about this one
            self._does(rank, STARTING)
        self._table[rank, STARTED] = me[1]
        self._table[rank, PID] = me[0]

    def claimed(self, rank: int) -> bool:
        """Whether a process has ever written its pid there."""
        return bool(self._table[rank, PID])

    def forget(self, rank: int) -> None:
        """Clear the row of a rank whose process has ended, and whose number is not used again."""
        self._table[rank] = 0

    def pid(self, rank: int) -> int:
        """The pid of a rank on this host while it lives, otherwise 0."""
        pid = int(self._table[rank, PID])
        # The pid of an ended process is used again by others; together with the start time it is
        # unique.
        return pid if pid and start_time(pid) == self._table[rank, STARTED] else 0

    def process(self, rank: int) -> tuple[int, int]:
        """The pid in the row of a rank, and when that process started."""
        pid, started = self._table[rank, [PID, STARTED]].tolist()
        return pid, started

    def write_remotely(self, rank: int) -> None:
        """Record that the device of this rank writes to memory of other ranks."""
        self._table[rank, REMOTE_WRITES] = 1

    def heartbeats(self) -> dict[int, int]:
        """The heartbeat of each rank that writes to this board, or did until it died. Without the ranks whose
        devices write to memory of others: kernels may run on until the process is gone."""
        here = np.flatnonzero((self._table[:, PID] != 0) & (self._table[:, REMOTE_WRITES] == 0))
        return dict(zip(here.tolist(), self._table[here, HEARTBEAT].tolist(), strict=True))

    def _state(self, row: Sequence[int]) -> str:
        """The state of the process of a row, as the kernel's letter; "" if it is dead."""
        state, started = _look_up(row[PID])
        return state if row[PID] and started == row[STARTED] else ""

    def kill(self, rank: int) -> None:
        """SIGKILL a rank of this host, if it still lives."""
        if pid := self.pid(rank):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has died meanwhile

    def join(self, rank: int) -> None:
        """Record that MPI is initialised on this rank."""
        self._table[rank, JOINED] = ScriptStage.JOINED
        self._does(rank, WARMING_UP)

    def enter_world(self, rank: int) -> None:
        """Record that this rank has called `recover.init()`."""
        self._table[rank, JOINED] = max(self._table[rank, JOINED], ScriptStage.WORLD)

    def make_step(self, rank: int) -> None:
        """Record that this rank has made a `recover.Step`."""
        self._table[rank, JOINED] = max(self._table[rank, JOINED], ScriptStage.STEP)

    def hold_state(self, rank: int) -> None:
        """Record that this rank has joined, and holds the state of the run."""
        self._table[rank, JOINED] = ScriptStage.STATE

    def stage(self, rank: int) -> ScriptStage:
        """How far the script of a rank has come."""
        return ScriptStage(int(self._table[rank, JOINED]))

    def joined(self, rank: int) -> bool:
        return bool(self._table[rank, JOINED])

    def enter(self, rank: int, agreement: int) -> None:
        """Record that this rank is about to take part in agreement number `agreement`."""
        self._table[rank, ENTERED] = agreement
        # Agreements outside a step, and inside a repair, are no votes.
        if self._table[rank, DOES] == REDUCING:
            self._does(rank, VOTING)

    def entered(self, rank: int) -> int:
        return int(self._table[rank, ENTERED])

    def arrive(self, rank: int, operation: int) -> None:
        """Record that this rank is about to take part in operation number `operation` of its
        cross-replica group."""
        self._table[rank, ARRIVED] = operation

    def arrived(self, rank: int) -> int:
        return int(self._table[rank, ARRIVED])

    def wait(self, rank: int, epoch: int, carried: int) -> None:
        """Record that this rank waits for others in this epoch (0: it does not); `carried` grows
        with the data it has carried."""
        self._table[rank, CARRIED] = carried
        self._table[rank, WAITS] = epoch

    def row(self, rank: int) -> list[int]:
        """The row of a rank."""
        row: list[int] = self._table[rank].tolist()
        return row

    def is_here(self, rank: int) -> bool:
        """Whether a rank writes to this board; other hosts have boards of their own."""
        return bool(self._table[rank, PID])

    def here(self) -> list[int]:
        """All ranks that write to this board, or did until they died."""
        return [int(rank) for rank in np.flatnonzero(self._table[:, PID])]

    def finish(self, rank: int, agreement: int) -> None:
        """Record that this rank holds the result of agreement number `agreement`."""
        self._table[rank, FINISHED] = agreement
        if self._table[rank, DOES] == VOTING:
            self._does(rank, UPDATING)

    def touch(self, rank: int) -> None:
        """Record that this rank is active, so it is not stuck."""
        self._table[rank, ACTIVITY] += 1

    def accomplish(self, rank: int) -> None:
        """Count permanent progress: work that never has to be repeated."""
        self._table[rank, ACCOMPLISHED] += 1

    def compute(self, rank: int, suspects: Sequence[tuple[int, int]]) -> None:
        """Record that this rank computes these slots (and samples), as far as the row can hold them.

        Without slots: it has finished.
        """
        row = self._table[rank]
        row[SLOT] = 0
        if suspects:
            first, sample = suspects[0]
            row[OFFSET] = sample - first
            row[SLOTS] = sum(
                1 << slot - first
                for slot, theirs in suspects
                if theirs - slot == sample - first and 0 <= slot - first < _SHOWN
            )
            row[SLOT] = first + 1
            self._does(rank, COMPUTING)

    def come_to_vote(self, rank: int) -> None:
        """Record that this rank has done its share of a step, and waits for the others."""
        self._table[rank, VOTES] += 1
        self._does(rank, REDUCING)

    def repair(self, rank: int) -> None:
        """Record that this rank has come to a repair."""
        self._does(rank, REPAIRING)

    def votes(self, rank: int) -> int:
        """How often a rank has come to a vote."""
        return int(self._table[rank, VOTES])

    def catch_up(self, rank: int, votes: int, step: int) -> None:
        """Set a joining rank to the position of the members, so that it does not count as late."""
        self._table[rank, VOTES] = votes
        self.in_step(rank, step)

    def in_step(self, rank: int, step: int) -> None:
        """Record that this rank is inside this step; 0: between two steps, where no hang limit applies."""
        self._table[rank, STEP] = step
        self._does(rank, PREPARING if step > 0 else ENDING if step == ENDED else BETWEEN)

    def step(self, rank: int) -> int:
        """The step that a rank is inside of, 0, or ENDED."""
        return int(self._table[rank, STEP])

    def announce(self, rank: int, call: int, position: int) -> None:
        """Record this rank's collective call and its position in the order of calls; 0: no call."""
        row = self._table[rank]
        row[CALL] = 0  # a reader between the two writes must not see the last call at the new position
        row[POSITION] = position
        row[CALL] = call

    def calls_beside(self, rank: int) -> dict[int, int]:
        """The calls of the living ranks of this host that are at the position of `rank`, its own
        included; empty while `rank` is in no call. A read in the middle of an announcement may show
        a call that was never made there."""
        call, position = self._table[rank, [CALL, POSITION]].tolist()
        if not call:
            return {}
        there = np.flatnonzero((self._table[:, POSITION] == position) & (self._table[:, CALL] != 0))
        beside = {int(other): int(self._table[other, CALL]) for other in there}
        if len(set(beside.values())) > 1:  # nearly never: the living need not be looked up
            beside = {other: theirs for other, theirs in beside.items() if self.pid(other)}
        return beside | {rank: call}

    def on_its_way(self, rank: int, agreement: int) -> bool:
        """Whether a rank of this host lives and has neither ended nor gone beyond this agreement."""
        return self.step(rank) != ENDED and self.entered(rank) <= agreement and bool(self.pid(rank))

    def beat(self, rank: int) -> None:
        """Record that the watcher of this process runs."""
        self._table[rank, HEARTBEAT] += 1

    def signs_of_life(self, me: int) -> dict[int, Sign]:
        """The signs of life of the ranks of this host, from their claim to their death."""
        return signs_of(self.living(), self._table[me].tolist())

    def living(self) -> dict[int, tuple[list[int], str]]:
        """The rows of the living ranks of this host, each with the state of its process as the
        kernel's letter."""
        claimed = np.flatnonzero(self._table[:, PID])
        rows = zip(claimed.tolist(), self._table[claimed].tolist(), strict=True)
        return {rank: (row, state) for rank, row in rows if (state := self._state(row))}

    def finished(self, rank: int) -> int:
        return int(self._table[rank, FINISHED])

    def now(self, rank: int) -> Now:
        """The activity of a rank, or the one in which it died, and for how long."""
        return now_of(self._table[rank].tolist(), time.monotonic_ns())

    def state(self, rank: int) -> str:
        """The state of a rank's process, as the kernel's letter; "" if it is dead."""
        return self._state(self._table[rank].tolist())

    def _does(self, rank: int, what: int) -> None:
        if self._table[rank, DOES] != what or not self._table[rank, SINCE] or what == COMPUTING:
            self._table[rank, SINCE] = time.monotonic_ns()
            self._table[rank, DOES] = what

    def held_by_others(self, agreement: int) -> bool:
        """Whether a living rank of this host holds the result of an agreement.

        A result that only dead ranks held is lost.
        """
        if (
            int(self._table[:, FINISHED].max()) < agreement
        ):  # nearly always, and cheaper than checking processes
            return False
        return any(self._table[rank, FINISHED] >= agreement and self.pid(rank) for rank in range(self.size))

    def accomplished(self) -> bytes:
        """The permanent progress of all ranks: two equal values mean no progress in between."""
        return self._table[:, : ACCOMPLISHED + 1].tobytes()


def signs_of(rows: Mapping[int, tuple[list[int], str]], me: Sequence[int]) -> dict[int, Sign]:
    """The signs of life in rows, as a rank with the row `me` sees them."""
    mine, here = me[STEP], (me[VOTES], me[ENTERED])
    # Ranks behind this one may themselves wait for the last of them.
    behind = [(row[VOTES], row[ENTERED]) for row, _ in rows.values() if row[STEP] == mine]
    last = min(behind, default=here)
    return {
        rank: Sign(
            heartbeat=row[HEARTBEAT],
            progress=tuple(row[ENTERED:HEARTBEAT]),
            late=0 < row[STEP] == mine and (row[VOTES], row[ENTERED]) == last < here,
            stopped=state in "Tt",
            step=row[STEP],
            suspects=_suspects(row),
            holds_state=row[JOINED] == ScriptStage.STATE,
        )
        for rank, (row, state) in rows.items()
    }


def furthest(rows: Iterable[Sequence[int]]) -> Sequence[int]:
    """The row that is furthest inside a step; a row of zeros if no rank is inside one."""
    inside = [row for row in rows if row[STEP] > 0]
    return max(inside, key=lambda row: (row[STEP], row[VOTES], row[ENTERED]), default=[0] * COLUMNS)


def can_go_on(rows: Mapping[int, tuple[list[int], str]], grid: Grid) -> bool:
    """Whether a whole replica runs that has the state of the run; a joining replica has none yet."""
    return bool(grid.whole(rank for rank in _holders(rows, grid) if rows[rank][1] not in "Tt"))


def may_be_ended(rows: Mapping[int, tuple[list[int], str]], grid: Grid) -> frozenset[int]:
    """The ranks that may be killed if they hang: all of them while a replica can go on.

    If no replica can, the whole replicas that have the state are left alone, because they may only be stopped for a
    while. All other ranks may be killed: a replica that has lost a rank cannot go on.

    `rows`: of all living ranks of the job.
    """
    if can_go_on(rows, grid):
        return frozenset(rows)
    return frozenset(rows).difference(grid.whole(_holders(rows, grid)))


def _holders(rows: Mapping[int, tuple[list[int], str]], grid: Grid) -> list[int]:
    """Ranks that have the state; a rank that was started to join has it once it was given all of it."""
    return [rank for rank, (row, _) in rows.items() if rank < grid.ranks or row[JOINED] == ScriptStage.STATE]


def now_of(row: Sequence[int], clock: int) -> Now:
    """The activity in a row.

    `clock`: the time by the clock of its column `SINCE`, in nanoseconds.
    """
    return Now(
        DOING[row[DOES]],
        max(0.0, (clock - row[SINCE]) / 1e9) if row[SINCE] else 0.0,
        max(0, row[STEP]),
        tuple(slot for slot, _ in _suspects(row)) if row[DOES] == COMPUTING else (),
    )


def _suspects(row: Sequence[int]) -> Suspects:
    first, bits, offset = row[SLOT] - 1, row[SLOTS], row[OFFSET]
    if first < 0:
        return ()
    return tuple((first + i, first + i + offset) for i in range(bits.bit_length()) if bits >> i & 1)


def start_time(pid: int) -> int:
    """When a process started, in ticks since boot; 0 if there is none, or a zombie."""
    return _look_up(pid)[1]


def age() -> float:
    """Seconds since this process was started, or, if it was prewarmed, since it was given its rank."""
    began = start_time(os.getpid()) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - max(began, process.waited_until)


def _look_up(pid: int) -> tuple[str, int]:
    """The state of a process as the kernel's letter, and its start time; "" and 0 if there is none."""
    try:
        # Every rank reads this of all others, so without Python's buffered files.
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return "", 0
    try:
        fields = os.read(fd, 4096).decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", 0  # it ended just now
    finally:
        os.close(fd)
    return ("", 0) if fields[0] in "ZX" else (fields[0], int(fields[19]))
