"""The witness: a thread that records how each rank ended, in `job.jsonl`, for `recover why`.

A rank leaves a marker if it can. Only an observer has its exit status (the kernel reports it for
any process since Linux 6.15), the kernel's log, the counters of its control group and of the GPUs,
whether the disk was full, and what the rank was doing, by its row of the board. One line of
`job.jsonl` holds all that is known of one end.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from recover.job.owner import describe_this_process
from recover.job.process import signal_name
from recover.job.spec import JobSpec
from recover.job.supervised import Supervised
from recover.runs.records.job_log import JobLog
from recover.world.liveness.host_faults import HostFaults, cgroup_of, disk_is_full, oom_kills
from recover.world.rank_exit import session_marker

if TYPE_CHECKING:
    from recover.world.liveness.board import Board

_LOOK = 0.1  # seconds between looks for ranks that have come up
_POLL = 2.0  # seconds between looks at the GPUs
_SOON = 0.005  # and between looks for the status of a rank that has ended
_REAPED = 0.5  # seconds: the kernel reports the status only after the parent, mpirun, has reaped the process
_CRASH = "Fatal Python error: "
_SHOWN = 12  # lines of a crash's stack

# `PIDFD_GET_INFO` of the kernel: request and layout of the answer (include/uapi/linux/pidfd.h).
_INFO = struct.Struct("=QQ11Ii")
_PID, _EXIT = 1 << 0, 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11


class Witness:
    """A thread of the launcher that sleeps until a rank ends. Errors here do not affect the job."""

    def __init__(self, run_dir: Path, host: str | None = None) -> None:
        """`host`: its name in a job on several hosts, each of which has a witness."""
        self._run_dir, self._log = run_dir, JobLog(run_dir, host)
        self._began = time.time()
        self._selector = selectors.DefaultSelector()
        self._seen: dict[
            int, tuple[int, str, int]
        ] = {}  # by rank: pid, control group, kills of that group so far
        self._leaving: dict[int, tuple[int, float]] = {}  # ended, without a status yet: pidfd, and when
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._session = Path()
        self._run: dict[str, Any] | None = None  # what its lines have in common; None: not begun
        self.outcome: dict[str, Any] = {}  # of the job, for the last line

    def __enter__(self) -> Self:
        return self

    def begin(self, spec: JobSpec) -> None:
        """Record the start, before any rank is started: then a job that could not start its ranks
        has a record, too."""
        assert spec.session is not None
        self._session = Path(spec.session)
        self._run = {"run": spec.etcd.prefix, "host": spec.host} if spec.etcd else {}
        self._log.write(
            {
                "what": "start",
                "at": round(self._began, 3),
                "ranks": spec.ranks,
                "replica_size": spec.replica_size,
                "host": spec.host or socket.gethostname(),
                **self._run,
                "session": spec.session,
                "faults": list(spec.faults),
                "script": spec.records,
                "owner": describe_this_process(),
            }
        )

    def watch(self, board: Board) -> None:
        """Watch the ranks, which have been started; they claim their rows of the board."""
        self._board = board
        self._host = HostFaults()
        self._thread = threading.Thread(target=self._loop, name="recover-witness", daemon=True)
        self._thread.start()

    def heard(self, host: str, ranks: Sequence[int], why: str, lease: float | None) -> None:
        """Record the loss of ranks of another host. `lease`: seconds, if their host was lost with
        its lease."""
        line = {
            "what": "heard",
            "at": round(time.time(), 3),
            "host": host,
            "lost_ranks": list(ranks),
            "why": why,
        }
        self._log.write(line | ({} if lease is None else {"lease": lease}))

    def held(self, why: str) -> None:
        """Record why lost replicas are not restarted from now on; "": they are."""
        self._log.write({"what": "held", "at": round(time.time(), 3), "why": why})

    def ending(self, reason: str) -> None:
        """Record that the launcher ends the ranks that are left: those that end now end with the
        job."""
        if self._run is not None:
            self._log.write({"what": "ending", "at": round(time.time(), 3), "reason": reason, **self._run})

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
        if self._run is not None:
            self._log.write({"what": "end", "at": round(time.time(), 3), **self._run, **self.outcome})

    def _loop(self) -> None:
        last, polled, supervised = False, 0.0, Supervised("the witness")
        while not last or self._leaving:
            last = self._stop.is_set()  # one more pass after that: all ranks have ended by then
            for key, _ in self._selector.select(_SOON if self._leaving or last else _LOOK):
                self._selector.unregister(key.fileobj)
                self._leaving[key.data] = (key.fd, time.time())
            for rank, (descriptor, at) in list(self._leaving.items()):
                status = exit_status(descriptor)
                if status or time.time() - at > _REAPED:
                    del self._leaving[rank]
                    os.close(descriptor)
                    with supervised.part("write down how a rank ended"):
                        self._end_of(rank, at, status)
            with supervised.part("look for new ranks"):
                self._look_for_new_ranks()
            if time.monotonic() - polled > _POLL:
                polled = time.monotonic()
                with supervised.part("look at the GPUs"):
                    self._host.poll()
            self._log.flush()

    def _look_for_new_ranks(self) -> None:
        for rank in self._board.here():
            if rank in self._seen:
                continue
            pid = self._board.pid(rank)
            if not pid:  # it started and ended between two looks
                self._seen[rank] = (0, "", 0)
                self._end_of(rank, time.time(), {})
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                continue  # it has ended: the next look finds that
            group = cgroup_of(pid)
            self._seen[rank] = (pid, group, oom_kills(group))
            self._selector.register(descriptor, selectors.EVENT_READ, rank)

    def _end_of(self, rank: int, at: float, status: dict[str, Any]) -> None:
        pid, group, killed_before = self._seen[rank]
        now = self._board.now(rank)
        line: dict[str, Any] = {"what": "exit", "at": round(at, 3), "rank": rank, "pid": pid}
        line |= status
        line |= {"step": now.step, "doing": now.doing, "slots": list(now.slots)}
        words = _read_json(self._run_dir / "ranks" / f"{rank}.end")
        line["words"] = words or _read_json(session_marker(self._session, rank))
        line["note"] = _read_json(self._run_dir / "ranks" / f"{rank}.slot")
        line["crash"] = _crash(self._run_dir / "ranks" / f"{rank}.stack")
        line["oom_kills"] = max(0, oom_kills(group) - killed_before)
        line["kernel"], line["gpu"] = self._host.look(pid)
        line["disk_full"] = next((str(p) for p in (self._run_dir, self._session) if disk_is_full(p)), "")
        kept = {name: value for name, value in line.items() if value or name in ("at", "rank", "code")}
        self._log.write(kept)


def exit_status(descriptor: int) -> dict[str, Any]:
    """How the process of a pidfd has ended; {} if the kernel does not report it, or the parent has
    not reaped it."""
    answer = bytearray(_INFO.pack(_PID | _EXIT, *[0] * 13))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, answer)
    except OSError:
        return {}
    asked, *_, status = _INFO.unpack(answer)
    if not asked & _EXIT:
        return {}
    if os.WIFSIGNALED(status):
        return {"signal": signal_name(os.WTERMSIG(status))}
    return {"code": os.waitstatus_to_exitcode(status)}


def _crash(path: Path) -> str:
    """The beginning of faulthandler's report of a crash in native code."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    _, found, rest = text.partition(_CRASH)
    return "\n".join((found + rest).splitlines()[:_SHOWN]) if found else ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
