"""The ranks of one host: started, watched and judged by its agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from recover.job import process
from recover.job.spec import VARIABLE, JobSpec
from recover.launch import preflight, rank_outputs
from recover.launch.relay import Relay
from recover.launch.session import Session
from recover.launch.telling import Teller
from recover.launch.verdict import Verdict, write_marker
from recover.launch.watched_job import WatchedJob
from recover.liveness.board import Board
from recover.world.ending import End

_TICK = 0.05  # seconds between looks at orders and signals, when nothing happens
_LOOK = 0.5  # seconds between looks at what the ranks do
_ASLEEP = 2.0  # seconds without a look after which this agent has slept itself


class HostRanks(WatchedJob):
    """`tell_end` is called with each rank that has ended: its marker, and why it is dead, "" if it has finished."""

    def __init__(
        self,
        spec: JobSpec,
        mine: Sequence[int],
        session: Session,
        command: Sequence[str],
        tell_end: Callable[[int, str, str], None],
    ) -> None:
        self.mine, self._tell_end = tuple(mine), tell_end
        self._board = Board(session.directory / "board", spec.ranks)
        environment = _environment(spec, session, len(mine))
        outputs = rank_outputs.make(session.directory, mine) if spec.records else {}
        copies = Path(str(spec.run_dir), "ranks")
        # The ranks end with the thread that starts them, so this is done in one that stays.
        self._processes = {
            rank: subprocess.Popen(
                [sys.executable, "-P", "-m", "recover.launch.bootstrap", *command],
                env=environment | {process.RANK: str(rank), process.RANK_ON_HOST: str(number)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C comes to us, and we end the job
            )
            for number, rank in enumerate(self.mine)
        }
        super().__init__(spec, Relay(*self._processes.values(), outputs=outputs, copies=copies))
        self.teller = Teller(self.run_dir) if spec.records else None
        for rank in self.mine:
            self.relay.wake_on(os.pidfd_open(self._processes[rank].pid))
        self.running = set(self.mine)

    def watch(self, timeout: float, must_end: Callable[[], bool], ends: Callable[[], dict[int, str]]) -> str:
        """Until the job has ended or must be ended: "", or the reason why it has failed. `ends`: of all hosts."""
        seen: object = None
        progress = look = time.monotonic()
        while not must_end():
            if self.relay.pump(_TICK):
                progress = time.monotonic()
            self._reap()
            now = time.monotonic()
            if now < look:
                continue
            slept, look = now - look > _ASLEEP, now + _LOOK
            state = (self._board.accomplished(), os.stat(self.run_dir / "ranks").st_mtime_ns)
            if state != seen or not self.running or slept:
                seen, progress = state, now
            self.take_over(ends())
            verdict = Verdict(self.run_dir, self.ranks)
            self.show_crashes(verdict, set(self.mine) - self.running)
            self.tell(verdict, [self._board.pid(rank) for rank in range(self.ranks)])
            if repeated := verdict.repeated(self.replica_size):
                return repeated
            if timeout and now - progress > timeout:
                self.show_stacks({rank: self._board.pid(rank) for rank in self.mine}, verdict)
                return f"no progress for {timeout:g} s (--timeout)"
        return ""

    def wait(self) -> None:
        """Until all are gone: they were killed, or have ended."""
        for rank_process in self._processes.values():
            rank_process.wait()
        self.relay.drain(1.0)

    def take_over(self, ends: dict[int, str]) -> None:
        """What agents of other hosts tell of their ranks is kept here, too: the verdict is the same everywhere."""
        for rank, marker in ends.items():
            path = self.run_dir / "ranks" / f"{rank}.end"
            self.ended.add(rank)
            if marker and not path.exists():
                write_marker(self.run_dir, rank, json.loads(marker))

    def _reap(self) -> None:
        for rank in sorted(self.running):
            code = self._processes[rank].poll()
            if code is None:
                continue
            self.running.discard(rank)
            self.ended.add(rank)
            marker = self._marker(rank)
            finished = bool(marker) and json.loads(marker)["end"] == End.DONE
            self._tell_end(rank, marker, "" if finished else _death(code))

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
        VARIABLE: str(spec.write()),
        "RECOVER_RUN_DIR": str(spec.run_dir),  # for scripts; our own code reads the file
        process.RANKS_ON_HOST: str(here),
        "TMPDIR": str(session.scratch),
    }


def _death(code: int) -> str:
    return (
        f"its process was ended by {signal.Signals(-code).name}"
        if code < 0
        else f"its process ended with {code}"
    )
