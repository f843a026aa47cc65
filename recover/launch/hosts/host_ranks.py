"""The ranks of one host: started, watched and judged by its agent."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recover.job.output import say
from recover.job.record_files import FILES
from recover.job.spec import VARIABLE, JobSpec
from recover.job.supervised import Supervised
from recover.launch import rank_outputs
from recover.launch.announcements import Teller
from recover.launch.hosts.replica_restarts import RestartedReplica
from recover.launch.hosts.slots import HostSlots
from recover.launch.job_code import HostCode
from recover.launch.output_relay import Relay
from recover.launch.prewarmed import ReadyProcesses, start
from recover.launch.rank_environment import job_environment, rank_variables
from recover.launch.session import Session
from recover.launch.verdict import as_marker, find_marker, marker_file, write_marker
from recover.launch.watched_job import WatchedJob
from recover.world.liveness.board import AT_WORK, Board
from recover.world.rank_exit import End

_TICK = 0.05  # seconds between looks at orders and signals, when nothing happens
_LOOK = 0.5  # seconds between looks at what the ranks do
_LAST_LOOK = 5.0  # seconds for the witness to read what one that has ended was doing
_ASLEEP = 2.0  # seconds without a look after which this agent has slept itself


class HostRanks(WatchedJob):
    """`tell_end` is called with each rank that has ended: its marker, and why it is dead, "" if it has finished.

    `mine`: the ranks that begin here, each with its slot. `slots`: the places of this host; `here`: how many. `ready`:
    processes that are kept for those who are started later. `held` is told why no replica is started again, and
    when it is again.
    """

    def __init__(
        self,
        spec: JobSpec,
        mine: Mapping[int, int],
        slots: HostSlots,
        here: int,
        session: Session,
        command: Sequence[str],
        tell_end: Callable[[int, str | None, str], None],
        ready: int = 0,
        held: Callable[[str], object] = lambda why: None,
    ) -> None:
        super().__init__(spec, Relay())
        self._spec, self._slots, self._command, self._tell_end = spec, slots, command, tell_end
        self.teller = Teller(self.run_dir) if spec.records else None
        self._session = session.directory
        self._code, self._held = HostCode(session.directory), held
        self._board = Board(session.directory / "board", spec.board_size)
        self._here = here
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._seats: dict[int, int] = {}
        self.mine: set[int] = set()
        self.running: set[int] = set()
        self._left: deque[tuple[float, int]] = deque()  # rows of the board to be forgotten, and when
        self.outside: set[int] = set()  # those of them who were started to join, and have not yet
        self._began: dict[int, float] = {}  # when each of these was started
        job = spec.write()
        self._environment = job_environment(spec, job, session.scratch, here)
        self._ready = ReadyProcesses(ready, command, self._environment, session.directory)
        for rank, slot in mine.items():
            self._start(rank, slot, job)

    def start_to_join(self, replica: RestartedReplica, across: bool) -> None:
        """Those of its ranks that sit here."""
        spec = replace(self._spec, joining=True)
        if across:
            spec = replace(spec, across=(*spec.across, replica.ranks[0] // spec.replica_size))
        mine = replica.on(str(spec.host))
        try:
            job = spec.write(_told_in(replica.ranks[0]))
            for rank, slot in mine.items():
                self.outside.add(rank)
                self._began[rank] = time.monotonic()
                self._start(rank, slot, job)
                self._say(f"rank {rank} is started on slot {slot}{_of(spec)}, to join")
        except Exception as error:  # no memory, no process, no descriptor: those who work here go on
            for rank, slot in mine.items():
                if rank in self.mine:  # what it says may not be read: it ends, and its mates with it
                    self._processes[rank].kill()
                    continue
                self.outside.discard(rank)
                self._began.pop(rank, None)
                self._slots.give_back(slot, time.monotonic())
                self._tell_end(rank, None, f"it could not be started: {type(error).__name__}: {error}")
                self._say(f"rank {rank} could not be started on slot {slot}{_of(spec)}: {error}")

    def _start(self, rank: int, slot: int, job: Path) -> None:
        """A rank ends with the thread that starts it, so this is done in one that stays."""
        outputs = rank_outputs.make(self._session, [rank]) if self._spec.records else {}
        environment = self._environment | {VARIABLE: str(job)} | rank_variables(rank, slot, self._here)
        started = self._ready.take(environment) or start(
            "recover.launch.bootstrap", self._command, environment, subprocess.DEVNULL
        )
        self._slots.take(slot, time.monotonic())
        self._processes[rank], self._seats[rank] = started, slot
        self.mine.add(rank)
        self.running.add(rank)
        self.relay.add(started, outputs, self.run_dir / "ranks")
        self.relay.wake_on(os.pidfd_open(started.pid))

    def admitted(self, participants: Collection[int]) -> None:
        """Who takes part counts from then on."""
        self.outside -= self.outside.intersection(participants)
        self.everyone.update(participants)

    def at_it(self) -> bool:
        """Whether one of them does something that it need not wait for others to end."""
        return any(self._board.now(rank).doing in AT_WORK for rank in self.running)

    def dismiss(self, ranks: Iterable[int], why: str) -> None:
        """End those who were to join, and are not needed any more."""
        for rank in sorted(self.outside.intersection(ranks) & self.running):
            write_marker(self.run_dir, rank, {"end": str(End.UNNEEDED), "detail": why, "time": ""})
            self._processes[rank].kill()
            self._say(f"rank {rank}, which was to join, is ended: {why}")

    def end_those_not_ready(self, asked: Collection[int], limit: float) -> None:
        """Those who were to join and have never `asked` for it hold their places for so many seconds at the most."""
        for rank in sorted((self.outside & self.running).difference(asked)):
            if time.monotonic() - self._began[rank] > limit and not self._board.votes(rank):
                why = f"it was not ready to join after {limit:g} s (--warm-up)"
                write_marker(self.run_dir, rank, {"end": str(End.FENCED), "detail": why, "time": ""})
                self._processes[rank].kill()
                self._began[rank] = float("inf")

    def watch(
        self, timeout: float, must_end: Callable[[], bool], ends: Callable[[], Mapping[int, str]]
    ) -> str:
        """Until the job has ended or must be ended: "", or the reason why it has failed. `ends`: of all hosts.

        Raises SupervisorError if it cannot look after its ranks any more.
        """
        supervised = Supervised("the agent")
        seen: object = None
        progress = look = time.monotonic()
        while True:
            with supervised.part("see whether the job goes on", essential=True):
                if must_end():
                    return ""
            with supervised.part("pass on what the ranks say"):
                if self.relay.pump(_TICK):
                    progress = time.monotonic()
            with supervised.part("look after its ranks", essential=True):
                self.reap()
            now = time.monotonic()
            if now < look:
                continue
            slept, look = now - look > _ASLEEP, now + _LOOK
            state = (self._board.accomplished(), FILES.modified(self.run_dir / "ranks"))
            with supervised.part("compare the files of this host with the job's"):
                if self._spec.room:
                    self._look_at_code()
            with supervised.part("keep processes ready"):
                if (
                    any(map(self._board.votes, self.running)) and not self.outside
                ):  # they need the cores first
                    self._ready.fill()
            if state != seen or not self.running or slept:
                seen, progress = state, now
            with supervised.part("take over what other agents say"):
                self.take_over(ends())
            with supervised.part("tell of losses"):
                verdict = self.verdict()
                if repeated := verdict.repeated(self.replica_size):
                    return repeated
                self.show_crashes(verdict, self.mine - self.running)
                here = range(self._board.size)
                self.tell(verdict, [self._board.pid(rank) if rank in self.mine else 0 for rank in here])
            if timeout and now - progress > timeout:
                with supervised.part("show what the ranks do"):
                    self.show_stacks({rank: self._board.pid(rank) for rank in self.mine}, self.verdict())
                return f"no progress for {timeout:g} s (--timeout)"

    def _look_at_code(self) -> None:
        """While the files of this host are not those of the job, no replica is started here: it would be refused."""
        why = self._code.differs()
        if why != self._slots.held:
            self._slots.hold(why)
            self._say(
                f"no replica is started again here: {why}" if why else "replicas are started again here"
            )
            self._held(why)

    def wait(self) -> None:
        """Until all are gone: they were killed, or have ended."""
        for started in self._processes.values():
            started.wait()
        self._ready.end()
        self.relay.drain(1.0)

    def take_over(self, ends: Mapping[int, str]) -> None:
        """What agents of other hosts tell of their ranks is kept here, too: the verdict is the same everywhere."""
        for rank, marker in ends.items():
            self.ended.add(rank)
            self.everyone.add(rank)
            told = as_marker(marker)
            if told and rank not in self.known and not FILES.read(marker_file(self.run_dir, rank)):
                write_marker(self.run_dir, rank, told)

    def reap(self) -> None:
        for rank in sorted(self.running):
            code = self._processes[rank].poll()
            if code is not None:
                self._has_ended(rank, code)
        while self._left and self._left[0][0] <= time.monotonic():
            _, rank = self._left.popleft()
            self._board.forget(rank)
            self.relay.forget(rank_outputs.label(rank))
            rank_outputs.remove(self._session, rank)
            first = rank - rank % self.replica_size
            if self.mine.isdisjoint(range(first, first + self.replica_size)):
                (self._session / _told_in(first)).unlink(missing_ok=True)

    def _has_ended(self, rank: int, code: int) -> None:
        """The others wait to hear of it: nothing that may go wrong here comes before that."""
        marker, slot = find_marker(self.run_dir, self._session, rank), self._seats[rank]
        told = as_marker(marker)
        finished = told is not None and told["end"] == End.DONE
        if self._board.votes(rank):  # it was let in, and lost before anybody could look
            self.admitted([rank])
        joined = rank not in self.outside
        self._tell_end(rank, marker if joined else None, "" if finished and joined else _death(code))
        self.running.discard(rank)
        if joined:
            self.ended.add(rank)
        elif finished or told is None or told["end"] != End.UNNEEDED:
            self._say(f"rank {rank}, which was to join, has ended before it did: {_how(told, code)}")
        if aside := self._slots.leave(slot, marker, code, time.monotonic()):
            self._say(f"slot {slot}{_of(self._spec)} is not tried again: {aside}")
        if rank >= self.ranks:
            self._forget(rank)

    def _forget(self, rank: int) -> None:
        """Ids are not used again, and there may be many of them."""
        self.outside.discard(rank)
        self._began.pop(rank, None)
        del self._processes[rank], self._seats[rank]
        self.mine.discard(rank)
        self._left.append((time.monotonic() + _LAST_LOOK, rank))

    def _say(self, text: str) -> None:
        self.relay.end_line()
        say(text)


def _told_in(first: int) -> str:
    """The file for a replica that joins, by its first rank."""
    return f"join-{first}.json"


def _of(spec: JobSpec) -> str:
    return f" of {spec.host}" if spec.host else ""


def _how(told: Mapping[str, Any] | None, code: int) -> str:
    return f"{told['end']}: {told['detail']}" if told else _death(code)


def _death(code: int) -> str:
    return (
        f"its process was ended by {signal.Signals(-code).name}"
        if code < 0
        else f"its process ended with {code}"
    )
