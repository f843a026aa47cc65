"""The ranks of one host that are started directly, without mpirun: the first ones, and those of
restarted replicas."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from recover.job.output import say
from recover.job.process import signal_name
from recover.job.spec import VARIABLE, JobSpec
from recover.launch import rank_outputs
from recover.launch.hosts.replica_restarts import RestartedReplica
from recover.launch.hosts.slots import HostSlots
from recover.launch.job_code import HostCode
from recover.launch.prewarmed import PrewarmedProcesses, start
from recover.launch.rank_environment import job_environment, rank_variables
from recover.launch.session import Session
from recover.launch.supervisor import Starter
from recover.launch.verdict import Verdict, as_marker, find_marker, write_marker
from recover.world.liveness.board import AT_WORK, Board
from recover.world.liveness.exiting import ExitingRanks, exit_code
from recover.world.rank_exit import ON_NOTICE, End

_LAST_LOOK = 5.0  # seconds for the witness to read the row of a rank that has ended


class HostRanks(Starter):
    """Starts the ranks of one host directly, and watches their processes.

    `first`: the ranks that begin here, each with its slot. `slots`: the slots of this host; `here`:
    how many.

    `report_end` is called with each rank whose process has ended: its marker, and why it is dead,
    "" if it finished. `prewarmed`: processes that are kept for ranks that are started later. `held`
    is called with the reason when no replica is started here, and with "" when replicas are started
    again.
    """

    name = "the agent"
    tick = 0.02  # all ranks of the job wait until a death is declared

    def __init__(
        self,
        spec: JobSpec,
        first: Mapping[int, int],
        slots: HostSlots,
        here: int,
        session: Session,
        command: Sequence[str],
        report_end: Callable[[int, str | None, str], None],
        prewarmed: int = 0,
        held: Callable[[str], object] = lambda why: None,
    ) -> None:
        super().__init__(spec)
        assert spec.run_dir is not None
        self._spec, self._first, self._slots, self._here = spec, first, slots, here
        self._command, self._report_end, self._held = command, report_end, held
        self._run_dir, self._session = Path(spec.run_dir), session.directory
        self._code = HostCode(session.directory)
        self._environment: dict[str, str] = {}
        self._scratch, self._most_prewarmed = session.scratch, prewarmed
        self._prewarmed = PrewarmedProcesses(0, command, {}, session.directory)
        self.board = Board(session.directory / "board", spec.board_size)
        self._exiting = ExitingRanks(self.board)
        self._declared: set[int] = set()  # ranks whose end was reported
        self.settled = self.ended  # the same set: what a rank leaves, it leaves before its process is reaped
        self.outside: set[int] = set()  # ranks that were started to join, and have not joined yet
        self.finished = False  # a script has come to its end here, and so has the job
        # ranks that ended in another way after the host began to leave
        self.lost_on_leaving: dict[int, str] = {}
        self._is_leaving = False
        self._mine: set[int] = set()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._seats: dict[int, int] = {}
        self._began: dict[int, float] = {}  # when each rank of `outside` was started
        self._left: deque[tuple[float, int]] = deque()  # rows of the board to be cleared, and when
        self.duties = {
            "compare the files of this host with the job's": self._compare_code,
            "keep processes ready": self._fill_prewarmed,
        }

    def start(self) -> None:
        job = self._spec.write()
        self._environment = job_environment(self._spec, job, self._scratch, self._here)
        self._prewarmed = PrewarmedProcesses(
            self._most_prewarmed, self._command, self._environment, self._session
        )
        for rank, slot in self._first.items():
            self._start(rank, slot, job)

    def start_joining_ranks(self, replica: RestartedReplica, across: bool) -> None:
        """Start the ranks of a replica that sit here. `across`: others of its ranks sit on other
        hosts."""
        spec = replace(self._spec, joining=True)
        if across:
            spec = replace(spec, across=(*spec.across, replica.ranks[0] // spec.replica_size))
        mine = replica.on(str(spec.host))
        try:
            job = spec.write(_job_file(replica.ranks[0]))
            for rank, slot in mine.items():
                self.outside.add(rank)
                self._began[rank] = time.monotonic()
                self._start(rank, slot, job)
                self._say(f"rank {rank} is started on slot {slot}{_of(spec)}, to join")
        except Exception as error:  # no memory, no process, no descriptor: the ranks that run here go on
            for rank, slot in mine.items():
                if rank in self._mine:  # its output may not be read: it is ended, and its replica with it
                    self._processes[rank].kill()
                    continue
                self.outside.discard(rank)
                self._began.pop(rank, None)
                self._slots.give_back(slot, time.monotonic())
                self._report_end(rank, None, f"it could not be started: {type(error).__name__}: {error}")
                self._say(f"rank {rank} could not be started on slot {slot}{_of(spec)}: {error}")

    def _start(self, rank: int, slot: int, job: Path) -> None:
        """Start a rank on the thread of the supervisor, which lives as long as the job: a rank ends
        with the thread that started it (PR_SET_PDEATHSIG)."""
        outputs = rank_outputs.make(self._session, [rank]) if self._spec.records else {}
        environment = self._environment | {VARIABLE: str(job)} | rank_variables(rank, slot, self._here)
        started = self._prewarmed.take(environment) or start(
            "recover.launch.bootstrap", self._command, environment, subprocess.DEVNULL
        )
        if warning := self._slots.take(slot, time.monotonic()):
            self._say(f"rank {rank} is started on slot {slot}{_of(self._spec)}: {warning}")
        self._processes[rank], self._seats[rank] = started, slot
        self._mine.add(rank)
        self.running.add(rank)
        self.relay.add(started, outputs, self._run_dir / "ranks")
        self.relay.wake_on(os.pidfd_open(started.pid))

    def admit(self, participants: Collection[int]) -> None:
        """Count ranks that take part among all ranks of the job, and no longer among the joining ones."""
        self.outside -= self.outside.intersection(participants)
        self.everyone.update(participants)

    def is_computing(self) -> bool:
        """Whether a rank of this host does something that it can finish without other ranks."""
        return any(self.board.now(rank).doing in AT_WORK for rank in self.running)

    def dismiss(self, ranks: Iterable[int], why: str) -> None:
        """End ranks that were to join and are not needed any more."""
        for rank in sorted((self.outside & self.running).intersection(ranks) - self._declared):
            write_marker(self._run_dir, rank, {"end": str(End.UNNEEDED), "detail": why, "time": ""})
            self._processes[rank].kill()
            self._say(f"rank {rank} is ended before it has joined: {why}")

    def close(self) -> None:
        """Start no replica here any more: this host leaves."""
        self._is_leaving = True
        self._slots.close()

    def leave_at_once(self, why: str) -> str:
        """Write the markers of the members here, which are about to be killed. Returns one of them."""
        marker = {"end": str(End.LEFT), "detail": why, "time": "", "at": time.time()}
        for rank in self.running - self.outside - self._declared:
            write_marker(self._run_dir, rank, marker)
        return json.dumps(marker)

    def end_ranks_not_ready(self, asked: Collection[int], limit: float) -> None:
        """End ranks that were started to join and have not `asked` to within `limit` seconds: they
        hold slots."""
        for rank in sorted((self.outside & self.running).difference(asked, self._declared)):
            if time.monotonic() - self._began[rank] > limit and not self.board.votes(rank):
                why = f"it was not ready to join after {limit:g} s (--warm-up)"
                write_marker(self._run_dir, rank, {"end": str(End.FENCED), "detail": why, "time": ""})
                self._processes[rank].kill()
                self._began[rank] = float("inf")

    def pids(self) -> dict[int, int]:
        return {rank: self.board.pid(rank) for rank in sorted(self._mine)}

    def look(self, verdict: Verdict, pids: Mapping[int, int], now: float) -> None:
        self.gone = self._mine - self.running

    def wait(self) -> None:
        for started in self._processes.values():
            started.kill()  # the guardian does so, too, but it may have been killed
            started.wait()
        self._prewarmed.end()
        self.relay.drain(1.0)

    def reap(self) -> str | None:
        for rank in self.running.intersection(self._exiting.look(time.monotonic())):
            # An exit with 0 is reported when the process is reaped: no other rank waits for it.
            if status := exit_code(self.board.process(rank)[0]):
                self._declare_end(rank, status)
        for rank in sorted(self.running):
            code = self._processes[rank].poll()
            if code is not None:
                self._has_ended(rank, code)
        while self._left and self._left[0][0] <= time.monotonic():
            _, rank = self._left.popleft()
            self.board.forget(rank)
            self.relay.forget(rank_outputs.label(rank))
            rank_outputs.remove(self._session, rank)
            size = self._spec.replica_size
            first = rank - rank % size
            if self._mine.isdisjoint(range(first, first + size)):
                (self._session / _job_file(first)).unlink(missing_ok=True)
        return None

    def _declare_end(self, rank: int, code: int) -> None:
        """Report the end of a rank. Its process is gone, or exiting: it leaves nothing more behind."""
        marker = find_marker(self._run_dir, self._session, rank)
        left = as_marker(marker)
        finished = left is not None and left["end"] == End.DONE
        self.finished |= finished
        death = ON_NOTICE if left is not None and left["end"] == End.LEFT else _death(code)
        if self.board.votes(rank):  # it was admitted, and lost before the next pass could see that
            self.admit([rank])
        joined = rank not in self.outside
        if self._is_leaving and joined and not finished and death != ON_NOTICE:
            self.lost_on_leaving[rank] = death
        # All ranks wait until the death is declared: nothing that may fail comes before it.
        self._report_end(rank, marker if joined else None, "" if finished and joined else death)
        self._declared.add(rank)

    def _has_ended(self, rank: int, code: int) -> None:
        if rank not in self._declared:
            self._declare_end(rank, code)
        marker, slot = find_marker(self._run_dir, self._session, rank), self._seats[rank]
        left = as_marker(marker)
        self.running.discard(rank)
        if rank not in self.outside:
            self.ended.add(rank)
        elif left is None or left["end"] != End.UNNEEDED:
            how = f"{left['end']}: {left['detail']}" if left else _death(code)
            self._say(f"rank {rank} ended before it had joined: {how}")
        if aside := self._slots.leave(slot, marker, code, time.monotonic()):
            self._say(f"slot {slot}{_of(self._spec)} is set aside: {aside}")
        if rank >= self._spec.ranks:
            self._forget(rank)

    def _forget(self, rank: int) -> None:
        """Forget a rank that has ended: ids of restarted ranks are not used again, and there may be
        many of them."""
        self.outside.discard(rank)
        self._declared.discard(rank)
        self._began.pop(rank, None)
        del self._processes[rank], self._seats[rank]
        self._mine.discard(rank)
        self._left.append((time.monotonic() + _LAST_LOOK, rank))

    def _compare_code(self) -> None:
        """Start no replica here while the files of this host differ from those of the job: it would
        be refused."""
        if not self._spec.room:
            return
        why = self._code.differs()
        if why != self._slots.held:
            self._slots.hold(why)
            self._say(
                f"no replica is started again here: {why}" if why else "replicas are started again here"
            )
            self._held(why)

    def _fill_prewarmed(self) -> None:
        """Start prewarmed processes, but not while ranks start up or wait to join: these need the
        cores first."""
        if any(map(self.board.votes, self.running)) and not self.outside:
            self._prewarmed.fill()

    def _say(self, text: str) -> None:
        self.relay.end_line()
        say(text)


def _job_file(first: int) -> str:
    """The name of the job file of a joining replica, by its first rank."""
    return f"join-{first}.json"


def _of(spec: JobSpec) -> str:
    return f" of {spec.host}" if spec.host else ""


def _death(code: int) -> str:
    return f"its process was ended by {signal_name(-code)}" if code < 0 else f"its process ended with {code}"
