"""The launcher: starts a script on many ranks under Open MPI's mpirun, watches it, and judges how it went.

The verdict comes from the ranks' own markers, never from mpirun, which returns 0 when every rank was killed.
Nothing of a job stays behind, however it ends: see `guardian`.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from recover.job.grid import Grid
from recover.job.output import OUTLET, say
from recover.job.process import RANK, RANK_ON_HOST, RANKS_ON_HOST
from recover.job.record_files import FILES
from recover.job.spec import VARIABLE, JobSpec, Monitors
from recover.job.supervised import Supervised
from recover.launch import hostfile, preflight, rank_outputs
from recover.launch.announcements import Teller
from recover.launch.output_relay import Relay
from recover.launch.preflight import Refusal
from recover.launch.session import Session
from recover.launch.verdict import Verdict, find_marker, name_ranks
from recover.launch.watched_job import WatchedJob
from recover.launch.witness import Witness
from recover.world.rank_exit import words_file
from recover.world.watchdog import HangWatchdog

if TYPE_CHECKING:
    from recover.world.liveness.board import Board

DEFAULT_TIMEOUT = 1800.0
_TICK = 0.05  # seconds between looks at signals and mpirun, when there is no output
_LOOK = 0.5  # seconds between looks at the ranks
_COMING = 30.0  # seconds that a rank may take from its first act until it is on the board
_LAST_WORDS = 2.0  # seconds without a reader of our output, after which one who is ended by a signal goes
_GRACE = 5.0  # seconds that mpirun gets to leave once every rank has ended; it was seen to hang


def launch(
    ranks: int,
    script: str | Path,
    args: Sequence[str] = (),
    *,
    replica_size: int = 1,
    run_dir: str | Path | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    mpirun: str | None = None,
    hang_limit: float | None = None,
    link_timeout: float | None = None,
    carrier: str = "auto",
    faults: Sequence[str] | None = None,
    module: bool = False,
    own: bool = False,
    monitors: Monitors = nullcontext,
    hosts: Path | None = None,
) -> int:
    """Run `script` (the name of a module, if `module`) on `ranks` ranks. Returns 0 (the survivors finished), 1 (it
    failed), 2 (it could not be started as asked), 4 (a rank raised outside of any step), or 128 + the signal that ended
    it. `hang_limit`, `link_timeout` and `faults` that are not given are read from the environment. `own`: it is a
    user's script. What it prints is labelled, its steps are written down, deaths are told as they happen, and one alone
    has our terminal. `beside` is entered, with the run directory, while it runs. `hosts`: a hostfile of Open MPI's, for
    several hosts.
    """
    script = Path(script)
    alone = ranks == 1 and hosts is None
    has_terminal = own and alone and sys.stdin is not None and sys.stdin.isatty()
    lock = None
    try:
        preflight.check_numbers(ranks, replica_size, timeout)
        limit = preflight.check_hang_limit(hang_limit, timeout)
        link_limit = preflight.check_link_timeout(link_timeout, timeout)
        preflight.check_carrier(carrier)
        if hosts is None:
            preflight.check_gpus(carrier, ranks)
        else:
            hostfile.check_hostfile(hosts, ranks)
        faults = preflight.check_faults(faults, ranks, replica_size)
        preflight.check_module(str(script)) if module else preflight.check_script(script)
        if not alone or mpirun is not None:
            mpirun = preflight.find_mpirun(mpirun)
            preflight.check_mpirun(mpirun)
        preflight.warn_of_untested_torch()
        directory, lock = preflight.open_run_dir(None if run_dir is None else Path(run_dir), script)
        FILES.report = say
        with (
            monitors(directory),
            Witness(directory) as witness,
            Session() as session,
            catching(session.end, has_terminal) as caught,
        ):
            spec = JobSpec(
                ranks,
                replica_size,
                carrier,
                limit,
                faults,
                run_dir=str(directory),
                session=str(session.directory),
                records=own,
                token=secrets.token_hex(16),
                link_timeout=link_limit,
            )
            if own:
                FILES.remove(directory / "summary.json")
            outputs = (
                rank_outputs.make(session.directory, range(ranks))
                if own and not alone and hosts is None
                else {}
            )
            environment = _environment(session, spec)
            if hosts is not None:
                say(hostfile.WARNING)
                environment = hostfile.environment(environment)
            named = ["-m", str(script)] if module else [str(script.absolute())]
            process = subprocess.Popen(
                [*_command(mpirun, spec, hosts), *named, *args],
                env=environment,
                stdin=None if own and alone else subprocess.DEVNULL,
                stdout=None if own and alone and os.isatty(1) else subprocess.PIPE,
                stderr=None if own and alone and os.isatty(2) else subprocess.PIPE,
                start_new_session=not has_terminal,  # Ctrl-C comes to us, and we end the job
            )
            hangs = HangWatchdog(Grid.of(ranks, replica_size), limit)
            relay = Relay(process, outputs=outputs, copies=directory / "ranks")
            job = _Job(spec, session, process, relay, hangs, spread=hosts is not None)
            job.teller = Teller(directory) if own else None
            # Whoever debugs may take his time.
            limit_here = 0 if has_terminal else timeout
            failure = job.watch(limit_here, caught, lambda board: witness.watch(spec, board))
            witness.ending(failure)
        if caught:
            say(f"ended by {signal.Signals(caught[0]).name}")
            FILES.patience = 0.0
            FILES.settle()
            return 128 + caught[0]
        job.relay.drain(1.0)
        process.poll()  # takes leave of an mpirun that the guardian had to kill
        code = job.judge(failure)
        FILES.settle()
        return code
    except Refusal as refusal:
        say(str(refusal))
        return 2
    except KeyboardInterrupt:  # before or after the time in which we handle it
        return 128 + signal.SIGINT
    finally:
        OUTLET.finish()
        if lock is not None:
            os.close(lock)


def _command(mpirun: str | None, spec: JobSpec, hosts: Path | None) -> list[str]:
    """What starts the ranks. One alone needs no MPI."""
    bootstrap = [sys.executable, "-P", "-m", "recover.launch.bootstrap"]
    if mpirun is None or (spec.is_alone and hosts is None):
        return bootstrap
    parameters = {
        "coll": "^han",  # between hosts it hangs after a death
        "coll_ftagree_era_topology": "2",  # a chain (its help says: a star); the default tree loses results
        "mpi_ft_detector": "false",  # crashes jobs at start-up; we fence hung ranks ourselves
        "pml": "ob1",  # the one that survives deaths
        "btl": "self,sm",  # the others are of no use on one host, and ofi alone takes a second to start
    }
    for framework in ("btl_sm", "osc_sm", "osc_rdma"):
        parameters[f"{framework}_backing_directory"] = str(spec.session)
    line = [mpirun, "--with-ft", "ulfm", "--oversubscribe", "--bind-to", "none", "-np", str(spec.ranks)]
    if hosts is not None:
        line, bootstrap = [*line, *hostfile.options(hosts, spec)], hostfile.rank_command(bootstrap)
        parameters = hostfile.parameters(parameters)
    for name, value in parameters.items():
        line += ["--mca", name, value]
    return [*line, *bootstrap]


def _environment(session: Session, spec: JobSpec) -> dict[str, str]:
    environment = preflight.clean_environment()
    cores = len(os.sched_getaffinity(0))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // spec.ranks)))
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if spec.is_alone:
        environment |= {RANK: "0", RANK_ON_HOST: "0", RANKS_ON_HOST: "1"}
    return environment | {
        VARIABLE: str(spec.write()),
        "RECOVER_RUN_DIR": str(spec.run_dir),  # for scripts; our own code reads the file
        "TMPDIR": str(session.scratch),  # Open MPI's session directory, too
    }


@contextmanager
def catching(end: Callable[[], object], has_terminal: bool = False) -> Iterator[list[int]]:
    """While inside, a signal that should end us ends the job; the list then holds the signal's number.

    The terminal tells a rank that has it of Ctrl-C itself: a debugger may make something else of it.
    """
    caught: list[int] = []

    def handle(number: int, _: object) -> None:
        if has_terminal and number == signal.SIGINT:
            return
        caught.append(number)
        OUTLET.patience = _LAST_WORDS
        end()  # here and now: the main loop may be blocked by a reader of our output

    previous = {}
    if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                previous[number] = signal.signal(number, handle)
    try:
        yield caught
    except OSError:
        if not caught:
            raise  # otherwise: the job was taken away under our hands, as it should be
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Job(WatchedJob):
    """One under mpirun. `ended` are the ranks that ended a while before mpirun did: not because of it."""

    def __init__(
        self,
        spec: JobSpec,
        session: Session,
        process: subprocess.Popen[bytes],
        relay: Relay,
        hangs: HangWatchdog,
        spread: bool = False,
    ) -> None:
        super().__init__(spec, relay)
        self.session, self.process, self.hangs = session, process, hangs
        self._heard: set[int] = set()  # ranks whose last words were found in memory
        self._spread = spread  # over several hosts: there is no board here that shows all of them

    def watch(self, timeout: float, caught: list[int], begun: Callable[[Board], object]) -> str:
        """Until the job has ended or must be ended: "", or the reason why it has failed."""
        from recover.world.liveness.board import Board  # imports numpy: while mpirun starts

        board = Board(self.session.directory / "board", self.ranks)
        begun(board)
        supervised = Supervised("the launcher")
        seen: object = None
        ended: set[int] = set()
        progress = last_running = look = stuck = time.monotonic()
        while not caught:
            # Not supervised: a reader of the output that leaves (`recover run ... | head`) ends the job. What a full
            # disk does not take is kept. A relay that is closed says that mpirun is about to leave.
            if self.relay.pump(_TICK if self.relay.open else _TICK / 10):
                progress = time.monotonic()
            if self.process.poll() is not None:
                return self._mpirun_left(board)
            now = time.monotonic()
            if now < look:
                continue
            look = now + _LOOK
            pids = [board.pid(rank) for rank in range(self.ranks)]
            state = (board.accomplished(), FILES.modified(self.run_dir / "ranks"), self._logged())
            if state != seen:
                seen, progress = state, now
            self._take_words(board)
            verdict = Verdict(self.run_dir, self.ranks)
            running = {
                rank
                for rank in verdict.silent
                if self._spread or pids[rank] or self._is_coming(board, verdict, rank)
            }
            self.ended, ended = ended, set(range(self.ranks)) - running
            with supervised.part("tell of losses"):
                self.show_crashes(verdict, ended)
                self.tell(verdict, pids)
            if repeated := verdict.repeated(self.replica_size):
                return repeated
            with supervised.part("look for ranks that hang"):
                self._fence_stopped(board, verdict, now)
            if running:
                last_running = now
            elif now - last_running > _GRACE:
                return ""  # mpirun hangs; the markers tell all there is to tell
            if self._spread or not ended or all(board.joined(rank) for rank in running):
                stuck = now
            elif now - stuck > _GRACE:
                return f"{name_ranks(sorted(ended))} ended before MPI was up, and the others wait for it; start again"
            if timeout and now - progress > timeout:
                self.show_stacks(dict(enumerate(pids)), verdict)
                return f"no progress for {timeout:g} s (--timeout)"
        return ""

    def _is_coming(self, board: Board, verdict: Verdict, rank: int) -> bool:
        """It has not started, or is on its way to the board: where cores are busy, that is imports for many seconds."""
        return not board.claimed(rank) and verdict.started_for(rank) < _COMING

    def _logged(self) -> int:
        """When a rank of several hosts has last logged something: their boards cannot be seen from here."""
        logs = (self.run_dir / "ranks").glob("*.log") if self._spread else ()
        return max(map(FILES.modified, logs), default=0)

    def _take_words(self, board: Board) -> None:
        """Markers that the disk did not take lie in memory, which goes with the session."""
        for rank in range(self.ranks):
            if (
                not board.pid(rank)
                and rank not in self._heard
                and words_file(self.session.directory, rank).exists()
            ):
                self._heard.add(rank)
                find_marker(self.run_dir, self.session.directory, rank)

    def _mpirun_left(self, board: Board) -> str:
        self._take_words(board)
        code = self.process.returncode
        unfinished = set(Verdict(self.run_dir, self.ranks).silent) - self.ended
        if self.ranks == 1:  # there is none: this was the rank itself
            return ""
        return f"mpirun was ended by {signal.Signals(-code).name}" if code < 0 and unfinished else ""

    def _fence_stopped(self, board: Board, verdict: Verdict, now: float) -> None:
        """Who has finished has agreed with all others before, so nobody waits for one that stops on its way out."""
        signs = board.signs_of_life(min(verdict.done)) if verdict.done else {}
        for rank, why in self.hangs.look(bool(signs), signs, now).items():
            board.kill(rank)
            say(f"killed rank {rank}: {why}, and others have finished")
