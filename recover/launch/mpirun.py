"""Ranks that Open MPI's mpirun starts on this host, or on those of a hostfile; one rank alone is
started without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from recover.job.grid import Grid
from recover.job.output import say
from recover.job.record_files import FILES
from recover.job.spec import JobSpec
from recover.launch import hostfile as hostfiles
from recover.launch import rank_outputs
from recover.launch.rank_environment import job_environment, rank_variables
from recover.launch.request import LaunchRequest
from recover.launch.session import Session
from recover.launch.supervisor import Starter
from recover.launch.verdict import Verdict, find_marker
from recover.runs.records.rank_ends import name_ranks
from recover.world.rank_exit import session_marker
from recover.world.watchdog import HangWatchdog

COMING = 30.0  # seconds from a rank's first act until it is on the board: imports, where cores are busy
GRACE = 5.0  # seconds for mpirun to leave once every rank has ended; it was seen to hang
_KILLED = 5.0  # seconds for a killed mpirun to be gone


class MpirunStarter(Starter):
    """Starts ranks under Open MPI's mpirun. `mpirun`: None for one rank alone. `has_terminal`: that
    rank gets the terminal of this process."""

    name = "the launcher"

    def __init__(
        self,
        spec: JobSpec,
        session: Session,
        request: LaunchRequest,
        mpirun: str | None,
        hostfile: Path | None,
        has_terminal: bool,
    ) -> None:
        super().__init__(spec)
        assert spec.run_dir is not None
        self._spec, self._session, self._request = spec, session, request
        self._mpirun, self._hostfile, self._has_terminal = mpirun, hostfile, has_terminal
        self._is_alone = spec.ranks == 1 and hostfile is None
        self._is_spread = hostfile is not None  # over hosts whose boards cannot be seen from here
        self._run_dir = Path(spec.run_dir)
        self.running = set(self.everyone)
        self.duties = {"take over markers that the disk did not take": self._take_words}
        self._heard: set[int] = set()  # ranks whose marker was found in memory
        self._ran = self._joined = 0.0  # when a rank ran last; when all that run were last in MPI
        # Ranks watch each other while they work. Once a rank has finished, or no replica is left,
        # the launcher looks for ranks that hang.
        self._grid = Grid.of(spec.ranks, spec.replica_size)
        self._hangs = HangWatchdog(self._grid, spec.hang_limit)

    def start(self) -> None:
        spec, alone = self._spec, self._is_alone and self._request.is_user_script
        labelled = self._request.is_user_script and not self._is_alone and not self._is_spread
        outputs = rank_outputs.make(self._session.directory, range(spec.ranks)) if labelled else {}
        self._process = subprocess.Popen(
            [*self._command(), *self._request.command],
            env=self._environment(),
            stdin=None if alone else subprocess.DEVNULL,
            stdout=None if alone and os.isatty(1) else subprocess.PIPE,
            stderr=None if alone and os.isatty(2) else subprocess.PIPE,
            start_new_session=not self._has_terminal,  # Ctrl-C comes to us, and we end the job
        )
        self.relay.add(self._process, outputs, self._run_dir / "ranks")
        with suppress(OSError):  # without pidfds the end of mpirun is seen at the next tick
            self.relay.wake_on(os.pidfd_open(self._process.pid))
        from recover.world.liveness.board import Board  # imports numpy: while mpirun starts

        self.board = Board(self._session.directory / "board", spec.ranks)
        self._ran = self._joined = time.monotonic()

    def reap(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        self._take_words()
        if self._is_alone:  # there is no mpirun: this was the rank itself
            return ""
        unfinished = set(Verdict(self._run_dir, self.everyone).silent) - self.ended
        return f"mpirun was ended by {signal.Signals(-code).name}" if code < 0 and unfinished else ""

    def pids(self) -> dict[int, int]:
        return {rank: self.board.pid(rank) for rank in sorted(self.everyone)}

    def wait(self) -> None:
        self.relay.drain(1.0)
        try:
            self._process.wait(_KILLED)
        except subprocess.TimeoutExpired:
            pass  # in an uninterruptible sleep: its end is the guardian's affair

    def logged(self) -> int:
        logs = (self._run_dir / "ranks").glob("*.log") if self._is_spread else ()
        return max(map(FILES.modified, logs), default=0)

    def look(self, verdict: Verdict, pids: Mapping[int, int], now: float) -> None:
        self.running = {
            rank for rank in verdict.silent if self._is_spread or pids[rank] or self._is_coming(verdict, rank)
        }
        # Ranks that were gone at the last look ended before mpirun did: not because of it.
        self.ended, self.gone = self.gone, self.everyone - self.running

    def check(self, verdict: Verdict, now: float) -> str | None:
        self._fence_stopped(verdict, now)
        if self.running:
            self._ran = now
        elif now - self._ran > GRACE:
            return ""  # mpirun hangs; the markers have all that is known
        if self._is_spread or not self.gone or all(map(self.board.joined, self.running)):
            self._joined = now
        elif now - self._joined > GRACE:
            return f"{name_ranks(sorted(self.gone))} ended before MPI was up, and the others wait for it; start again"
        return None

    def _is_coming(self, verdict: Verdict, rank: int) -> bool:
        """Whether a rank has not started, or is on its way to the board."""
        return not self.board.claimed(rank) and verdict.started_for(rank) < COMING

    def _take_words(self) -> None:
        """Save markers that the disk did not take: they lie in the session, and would go with it."""
        for rank in self.everyone - self._heard:
            if not self.board.pid(rank) and session_marker(self._session.directory, rank).exists():
                self._heard.add(rank)
                find_marker(self._run_dir, self._session.directory, rank)

    def _fence_stopped(self, verdict: Verdict, now: float) -> None:
        """Kill stopped ranks that no other rank watches: the launcher would wait for them.

        A rank that has finished has agreed with all others before, so no rank waits for one that
        stops on its way out. And if no whole replica is left, the other ranks end by themselves.
        """
        signs, why = {}, ""
        if verdict.done:
            signs, why = self.board.signs_of_life(min(verdict.done)), "others have finished"
        elif self.gone and not self._grid.whole(self.running):
            signs, why = self.board.signs_of_life(min(self.gone)), "no replica is left"
        for rank, reason in self._hangs.look(bool(signs), signs, now).items():
            self.board.kill(rank)
            say(f"killed rank {rank}: {reason}, and {why}")

    def _environment(self) -> dict[str, str]:
        spec = self._spec
        environment = job_environment(spec, spec.write(), self._session.scratch, spec.ranks)
        if self._is_alone:
            return environment | rank_variables(0, 0, 1)
        if os.geteuid() == 0:
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return hostfiles.environment(environment) if self._is_spread else environment

    def _command(self) -> list[str]:
        bootstrap = [sys.executable, "-P", "-m", "recover.launch.bootstrap"]
        if self._mpirun is None or self._is_alone:
            return bootstrap
        parameters = {
            "coll": "^han",  # between hosts it hangs after a death
            "coll_ftagree_era_topology": "2",  # a chain (its help says: a star); the default tree loses results
            "mpi_ft_detector": "false",  # crashes jobs at start-up; we fence hung ranks ourselves
            "pml": "ob1",  # the one that survives deaths
            "btl": "self,sm",  # the others are of no use on one host, and ofi alone takes a second to start
        }
        for framework in ("btl_sm", "osc_sm", "osc_rdma"):
            parameters[f"{framework}_backing_directory"] = str(self._spec.session)
        line = [self._mpirun, "--with-ft", "ulfm", "--oversubscribe", "--bind-to", "none"]
        line += ["-np", str(self._spec.ranks)]
        if self._hostfile is not None:
            line += hostfiles.options(self._hostfile, self._spec)
            bootstrap = hostfiles.rank_command(bootstrap)
            parameters = hostfiles.parameters(parameters)
        for name, value in parameters.items():
            line += ["--mca", name, value]
        return [*line, *bootstrap]
