"""The supervisor of a job on one host: watches its ranks from their start to their end, and judges
how the job went.

There is one supervisor, for one host and for several. A `Starter` starts the ranks and knows their
processes: under mpirun (`recover.launch.mpirun`) or directly (`recover.launch.hosts.host_ranks`). A
`Coordination` connects it with the other hosts of the job (`recover.launch.hosts.coordination`); a
job on one host under mpirun has none.

The verdict comes from the markers that ranks leave, never from exit codes: mpirun returns 0 when
every rank was killed.
"""

from __future__ import annotations

import enum
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from recover.job.output import say
from recover.job.record_files import FILES
from recover.job.spec import JobSpec
from recover.job.supervised import Supervised
from recover.launch.announcements import Announcer
from recover.launch.missing_step import MissingStep
from recover.launch.output_relay import Relay
from recover.launch.verdict import (
    RAISED,
    EndOfRank,
    Verdict,
    as_marker,
    marker_file,
    write_marker,
)
from recover.runs.records.rank_ends import name_ranks
from recover.world.rank_exit import STACK_SIGNAL

if TYPE_CHECKING:
    from recover.launch.session import Session
    from recover.launch.witness import Witness
    from recover.world.liveness.board import Board

_LOOK = 0.5  # seconds between two looks at what the ranks have done
_ASLEEP = 2.0  # seconds by which a look may be late; later, this process was stopped itself
_ANSWER = 1.0  # seconds for ranks to write their stacks


class State(enum.Enum):
    """States of a job on one host, in their order."""

    RENDEZVOUS = enum.auto()  # the hosts find each other; no rank has been started here
    RUNNING = enum.auto()  # ranks run, are watched, and are started again
    ENDING = (
        enum.auto()
    )  # no rank is started any more; those that are left are ended, and other hosts hear why
    JUDGED = enum.auto()  # no process of the job is left on this host; its exit code is known


_FOLLOWING = {
    State.RENDEZVOUS: (State.RUNNING, State.JUDGED),  # refused, or ended by a signal
    State.RUNNING: (State.ENDING,),
    State.ENDING: (State.JUDGED,),
    State.JUDGED: (),
}


class Lifecycle:
    """The state of a job on this host. Each state is entered once."""

    def __init__(self) -> None:
        self.state = State.RENDEZVOUS

    def enter(self, state: State) -> None:
        if state not in _FOLLOWING[self.state]:
            raise RuntimeError(f"a job that is {self.state.name} cannot be {state.name} next")
        self.state = state


class Starter(ABC):
    """Starts the ranks of a job on this host, and knows what became of their processes.

    `board`, on which the ranks of this host show what they do, exists once they are started.
    """

    name: str  # in messages: the launcher, the agent
    tick = 0.05  # seconds between two passes, when there is no output and no process ends
    board: Board

    def __init__(self, spec: JobSpec) -> None:
        self.relay = Relay()
        self.everyone = set(range(spec.ranks))  # the first ranks, and those that have joined
        self.running: set[int] = set()  # ranks of this host with a process
        self.ended: set[int] = set()  # ranks that ended by themselves, before the job was ended
        self.gone: set[int] = set()  # ranks of this host without a process
        self.settled: set[int] = set()  # ranks that leave nothing more: what they have left is read once
        self.duties: Mapping[str, Callable[[], object]] = {}  # by name: what else is done in every look

    @abstractmethod
    def start(self) -> None:
        """Start the first ranks."""

    @abstractmethod
    def reap(self) -> str | None:
        """Notice processes that have ended. Returns None while the job goes on; otherwise why it
        has failed, or ""."""

    @abstractmethod
    def pids(self) -> dict[int, int]:
        """The processes of the ranks of this host; 0 for a rank that has none."""

    @abstractmethod
    def wait(self) -> None:
        """Return when all processes, which are being ended, have ended, and their output was passed
        on."""

    def logged(self) -> int:
        """When ranks that the board does not show have last logged something."""
        return 0

    @abstractmethod
    def look(self, verdict: Verdict, pids: Mapping[int, int], now: float) -> None:
        """Bring `running`, `ended` and `gone` up to date, where `reap` does not."""

    def check(self, verdict: Verdict, now: float) -> str | None:
        """Returns why the ranks cannot go on, or "" if they have ended; None if they go on."""
        return None


class Coordination(Protocol):
    """The other hosts of a job."""

    def start(self) -> None:
        """Called before any rank is started."""

    def must_end(self) -> bool:
        """Whether the ranks of this host are to be ended. Called in every pass; starts ranks that
        are to join."""

    def ends(self) -> Mapping[int, str]:
        """Markers of ranks of all hosts."""


class Supervisor:
    """Supervises the ranks of one host. `caught`: signals that end the job. The job also ends with
    the reader of its output (`... | head`)."""

    def __init__(
        self,
        spec: JobSpec,
        starter: Starter,
        session: Session,
        witness: Witness,
        caught: list[int],
        coordination: Coordination | None = None,
        lifecycle: Lifecycle | None = None,
    ) -> None:
        assert spec.run_dir is not None
        self._spec, self._starter, self._session, self._witness = spec, starter, session, witness
        self._caught, self._coordination = caught, coordination
        self._lifecycle = lifecycle or Lifecycle()
        self._run_dir, self._replica_size = Path(spec.run_dir), spec.replica_size
        self._announcer = Announcer(self._run_dir) if spec.records else None
        self._missing_step = MissingStep() if spec.records else None
        self._known: dict[int, EndOfRank] = {}  # what settled ranks have left
        self._shown: set[int] = set()  # ranks whose crash was shown
        self._seen: object = None  # what the ranks had done at the last look
        self._progress = 0.0  # when that was last another

    def start(self) -> None:
        self._lifecycle.enter(State.RUNNING)
        if self._coordination is not None:
            self._coordination.start()
        # Before the ranks are started: the records then include a start that fails.
        self._witness.begin(self._spec)
        self._starter.start()
        self._witness.watch(self._starter.board)

    def watch(self, timeout: float) -> str:
        """Return when the job has ended or must be ended: "", or the reason why it has failed.

        `timeout`: seconds without progress after which it has failed; 0: never. Raises
        SupervisorError if the ranks of this host cannot be looked after any more.
        """
        supervised = Supervised(self._starter.name)
        self._progress = look = time.monotonic()
        while True:
            with supervised.part("see whether the job goes on", essential=True):
                if self._caught or (self._coordination is not None and self._coordination.must_end()):
                    return ""
            if gone := self._pass_on_output(supervised):
                return gone
            with supervised.part("look after its ranks", essential=True):
                if (why := self._starter.reap()) is not None:
                    return why
            now = time.monotonic()
            if now < look:
                continue
            slept, look = now - look > _ASLEEP, now + _LOOK
            if (why := self._look(supervised, now, slept)) is not None:
                return why
            look = time.monotonic() + _LOOK  # a slow look is not taken for a host that slept
            if timeout and now - self._progress > timeout:
                with supervised.part("show what the ranks do"):
                    self._show_stacks()
                return f"no progress for {timeout:g} s (--timeout)"

    def end(self, reason: str, is_told: bool = True) -> None:
        """End what is left of the job on this host. `is_told`: the records say that ranks end with
        the job."""
        self._lifecycle.enter(State.ENDING)
        if is_told:
            self._witness.ending(reason)
        self._session.end()
        self._starter.wait()

    def judge(self, failure: str) -> int:
        """Say how the job went, and return its exit code. `failure`: what is known to have gone
        wrong, or ""."""
        self._lifecycle.enter(State.JUDGED)
        unfinished = self._starter.everyone - self._starter.ended if failure else ()
        verdict = Verdict(self._run_dir, self._starter.everyone, unfinished)
        self._tell(verdict, {}, at_end=True)
        self._show_crashes(verdict, verdict.silent)
        for path in verdict.directory.glob("*.stack"):
            if FILES.read(path) == b"":
                FILES.remove(path)
        if not failure and not verdict.done:
            failure = "no rank finished"
        repeated = verdict.repeated(self._replica_size)
        logs = f"(logs in {verdict.directory})"
        if failure:
            say(f"failed, {repeated or failure}; {verdict.losses()} {logs}")
            return RAISED if repeated else 1
        if left := verdict.left_on_notice:
            say(f"{name_ranks(left)} left on notice")
        if verdict.lost:
            raised = f"; but {verdict.raised_outside_step()}" if verdict.raised else ""
            say(f"done on {name_ranks(verdict.done)}; lost: {verdict.losses()}{raised} {logs}")
        return RAISED if verdict.raised else 0

    def take_over(self, ends: Mapping[int, str]) -> None:
        """Keep the markers of ranks of other hosts here, too, so that the verdict is the same on
        all hosts."""
        for rank, marker in ends.items():
            self._starter.ended.add(rank)
            self._starter.everyone.add(rank)
            left = as_marker(marker)
            if left and rank not in self._known and not FILES.read(marker_file(self._run_dir, rank)):
                write_marker(self._run_dir, rank, left)

    def verdict(self) -> Verdict:
        """The verdict at this moment. Settled ranks are read once: after weeks of restarts there
        are thousands of them."""
        verdict = Verdict(self._run_dir, self._starter.everyone, known=self._known)
        settled = self._starter.settled
        self._known.update((rank, verdict.left[rank]) for rank in settled.difference(self._known))
        return verdict

    def _pass_on_output(self, supervised: Supervised) -> str:
        """Pass on what the ranks write. Returns why the job is to be ended, if its output has no
        reader any more."""
        with supervised.part("pass on what the ranks say"):
            try:
                if self._starter.relay.pump(self._starter.tick):
                    self._progress = time.monotonic()
            except (BrokenPipeError, ConnectionResetError) as error:
                return f"its output has no reader any more ({error.strerror})"
        return ""

    def _look(self, supervised: Supervised, now: float, slept: bool) -> str | None:
        """Look at the ranks, twice a second. Returns why the job is to be ended, or "" if it has
        ended; None if it goes on."""
        starter = self._starter
        # Before the markers: a rank that ends in between has a marker and a process, and is not
        # taken for killed.
        pids = starter.pids()
        state = (starter.board.accomplished(), FILES.modified(self._run_dir / "ranks"), starter.logged())
        if state != self._seen or not starter.running or slept:
            self._seen, self._progress = state, now
        for what, duty in starter.duties.items():
            with supervised.part(what):
                duty()
        if self._coordination is not None:
            with supervised.part("take over what other agents say"):
                self.take_over(self._coordination.ends())
        verdict = None
        with supervised.part("read what the ranks have left"):
            verdict = self.verdict()
            starter.look(verdict, pids, now)
        if verdict is None:
            return None
        with supervised.part("tell of losses"):
            self._show_crashes(verdict, starter.gone)
            self._tell(verdict, pids)
            if self._missing_step is not None and (missing := self._missing_step.report(starter.board, pids)):
                starter.relay.end_line()
                say(missing)
        if repeated := verdict.repeated(self._replica_size):
            return repeated
        with supervised.part("look for ranks that hang"):
            return starter.check(verdict, now)
        return None

    def _tell(self, verdict: Verdict, pids: Mapping[int, int], at_end: bool = False) -> None:
        if self._announcer is not None:
            alive = {rank for rank, pid in pids.items() if pid}
            losses = (
                [] if at_end else self._announcer.losses(verdict, alive)
            )  # at the end the verdict names all
            for text in (*losses, *self._announcer.repairs(at_end)):
                self._starter.relay.end_line()
                say(text)
        if at_end:
            self._starter.relay.end_line()

    def _show_crashes(self, verdict: Verdict, among: Iterable[int]) -> None:
        """Show the stacks of ranks that crashed in native code, which leave no marker."""
        for rank in set(verdict.crashed).intersection(among) - self._shown:
            self._shown.add(rank)
            say(f"rank {rank} crashed:\n{verdict.stack(rank)}")

    def _show_stacks(self) -> None:
        pids, verdict = self._starter.pids(), self.verdict()
        for pid in filter(None, pids.values()):
            try:
                os.kill(pid, STACK_SIGNAL)
            except ProcessLookupError:
                pass
        self._starter.relay.drain(_ANSWER)
        for rank, pid in pids.items():
            if pid:
                text = verdict.stack(rank) or "does not answer"
            else:
                text = "has ended" if verdict.has_started(rank) else "has not started"
            say(f"rank {rank} (pid {pid or '-'}):\n{text}")
