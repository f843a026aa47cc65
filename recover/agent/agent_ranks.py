"""The ranks of one host: started, watched and judged by its agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from recover.agent.free_slots import HostSlots
from recover.agent.returns import Newcomer
from recover.job import process
from recover.job.outlet import say
from recover.job.spec import VARIABLE, JobSpec
from recover.launch import preflight, rank_outputs
from recover.launch.job_code import HostCode
from recover.launch.relay import Relay
from recover.launch.session import Session
from recover.launch.telling import Teller
from recover.launch.verdict import write_marker
from recover.launch.watched_job import WatchedJob
from recover.liveness.board import AT_WORK, Board
from recover.ready.kept import ReadyProcesses, start
from recover.world.ending import End

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
        self._environment = _environment(spec, session, here)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._seats: dict[int, int] = {}
        self.mine: set[int] = set()
        self.running: set[int] = set()
        self._left: deque[tuple[float, int]] = deque()  # rows of the board to be forgotten, and when
        self.outside: set[int] = set()  # those of them who were started to join, and have not yet
        self._began: dict[int, float] = {}  # when each of these was started
        job = str(spec.write())
        self._ready = ReadyProcesses(ready, command, self._environment | {VARIABLE: job}, session.directory)
        for rank, slot in mine.items():
            self._start(rank, slot, job)

    def start_to_join(self, newcomer: Newcomer, across: bool) -> None:
        """Those of its ranks that sit here."""
        spec = replace(self._spec, joining=True)
        if across:
            spec = replace(spec, across=(*spec.across, newcomer.ranks[0] // spec.replica_size))
        job = spec.write(_told_in(newcomer.ranks[0]))
        for rank, slot in newcomer.on(str(spec.host)).items():
            self.outside.add(rank)
            self._began[rank] = time.monotonic()
            self._start(rank, slot, str(job))
            self._say(f"rank {rank} is started on slot {slot}{_of(spec)}, to join")

    def _start(self, rank: int, slot: int, job: str) -> None:
        """A rank ends with the thread that starts it, so this is done in one that stays."""
        outputs = rank_outputs.make(self._session, [rank]) if self._spec.records else {}
        told = {VARIABLE: job, process.RANK: str(rank), process.RANK_ON_HOST: str(slot)}
        environment = self._environment | told
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

    def watch(self, timeout: float, must_end: Callable[[], bool], ends: Callable[[], dict[int, str]]) -> str:
        """Until the job has ended or must be ended: "", or the reason why it has failed. `ends`: of all hosts."""
        seen: object = None
        progress = look = time.monotonic()
        while not must_end():
            if self.relay.pump(_TICK):
                progress = time.monotonic()
            self.reap()
            now = time.monotonic()
            if now < look:
                continue
            slept, look = now - look > _ASLEEP, now + _LOOK
            state = (self._board.accomplished(), os.stat(self.run_dir / "ranks").st_mtime_ns)
            if self._spec.room:
                self._look_at_code()
            if any(map(self._board.votes, self.running)) and not self.outside:  # they need the cores first
                self._ready.fill()
            if state != seen or not self.running or slept:
                seen, progress = state, now
            self.take_over(ends())
            verdict = self.verdict()
            self.show_crashes(verdict, self.mine - self.running)
            here = range(self._board.size)
            self.tell(verdict, [self._board.pid(rank) if rank in self.mine else 0 for rank in here])
            if repeated := verdict.repeated(self.replica_size):
                return repeated
            if timeout and now - progress > timeout:
                self.show_stacks({rank: self._board.pid(rank) for rank in self.mine}, verdict)
                return f"no progress for {timeout:g} s (--timeout)"
        return ""

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

    def take_over(self, ends: dict[int, str]) -> None:
        """What agents of other hosts tell of their ranks is kept here, too: the verdict is the same everywhere."""
        for rank, marker in ends.items():
            path = self.run_dir / "ranks" / f"{rank}.end"
            self.ended.add(rank)
            self.everyone.add(rank)
            if marker and rank not in self.known and not path.exists():
                write_marker(self.run_dir, rank, json.loads(marker))

    def reap(self) -> None:
        for rank in sorted(self.running):
            code = self._processes[rank].poll()
            if code is None:
                continue
            self.running.discard(rank)
            marker, slot = self._marker(rank), self._seats[rank]
            finished = bool(marker) and json.loads(marker)["end"] == End.DONE
            if self._board.votes(rank):  # it was let in, and lost before anybody could look
                self.admitted([rank])
            if rank in self.outside:
                if finished or not marker or json.loads(marker)["end"] != End.UNNEEDED:
                    self._say(
                        f"rank {rank}, which was to join, has ended before it did: {_how(marker, code)}"
                    )
                finished = False
            else:
                self.ended.add(rank)
            if aside := self._slots.leave(slot, marker, code, time.monotonic()):
                self._say(f"slot {slot}{_of(self._spec)} is not tried again: {aside}")
            told = None if rank in self.outside else marker
            self._tell_end(rank, told, "" if finished else _death(code))
            if rank >= self.ranks:
                self._forget(rank)
        while self._left and self._left[0][0] <= time.monotonic():
            _, rank = self._left.popleft()
            self._board.forget(rank)
            self.relay.forget(rank_outputs.label(rank))
            rank_outputs.remove(self._session, rank)
            first = rank - rank % self.replica_size
            if self.mine.isdisjoint(range(first, first + self.replica_size)):
                (self._session / _told_in(first)).unlink(missing_ok=True)

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

    def _marker(self, rank: int) -> str:
        try:
            return (self.run_dir / "ranks" / f"{rank}.end").read_text()
        except FileNotFoundError:
            return ""


def _environment(spec: JobSpec, session: Session, here: int) -> dict[str, str]:
    environment = preflight.clean_environment()
    cores = len(os.sched_getaffinity(0))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // here)) if here else "1")
    return environment | {
        "RECOVER_RUN_DIR": str(spec.run_dir),  # for scripts; our own code reads the file
        process.RANKS_ON_HOST: str(here),
        "TMPDIR": str(session.scratch),
    }


def _told_in(first: int) -> str:
    """The file for a replica that joins, by its first rank."""
    return f"join-{first}.json"


def _of(spec: JobSpec) -> str:
    return f" of {spec.host}" if spec.host else ""


def _how(marker: str, code: int) -> str:
    told = json.loads(marker) if marker else None
    return f"{told['end']}: {told['detail']}" if told else _death(code)


def _death(code: int) -> str:
    return (
        f"its process was ended by {signal.Signals(-code).name}"
        if code < 0
        else f"its process ended with {code}"
    )
