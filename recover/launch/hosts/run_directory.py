"""The run directory of a job on several hosts, which may share it or not: each directory has one
writer.

Every agent leaves a file of its own in its run directory before the rendezvous, and afterwards
lists the files of other hosts that it can see there.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recover.job.record_files import FILES
from recover.launch.hosts.placement import Seat
from recover.launch.hosts.rendezvous import HostPlan, Rendezvous
from recover.launch.preflight import Refusal, make_run_dir, remove_markers
from recover.runs.records.job_log import PLACEMENT
from recover.world.fabrics.etcd.client import EtcdClient

SEES = "sees/"
_AGAIN, _PATIENCE, _TURN = 0.05, 60.0, 2.0  # seconds


class SeenDirectories:
    def __init__(self, run_dir: Path, meeting: Rendezvous) -> None:
        self._run_dir, self._meeting = run_dir, meeting
        self._mine = self._file(meeting.me.id)

    def __enter__(self) -> SeenDirectories:
        try:
            self._mine.touch()
        except OSError as error:
            raise Refusal(
                f"run directory {self._run_dir} cannot be written ({error}); make room, or give another --run-dir"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        FILES.remove(self._mine)

    def compare(
        self, client: EtcdClient, plan: HostPlan, stopped: Callable[[], object]
    ) -> tuple[tuple[int, ...], ...]:
        """The ranks, grouped by the directory that they see. Returns when all hosts have looked:
        all are ready."""
        me, first_ones = self._meeting.me.host, {seat.host for seat in plan.seats}
        if not self._meeting.late:  # the writers of a running job are decided
            first_ones = set(plan.hosts)
            remove_markers(self._run_dir)
            seen = [host for host, facts in plan.hosts.items() if self._file(facts["id"]).exists()]
            client.put(f"{SEES}{me}", json.dumps(seen).encode())
        deadline = time.monotonic() + _PATIENCE
        while not stopped():
            found, _ = client.get_all(SEES)
            views = {one.key.removeprefix(SEES): set(json.loads(one.value)) for one in found}
            if missing := sorted(first_ones - views.keys()):
                gone = [host for host in missing if host not in (me, *self._meeting.others(plan))]
                if self._meeting.late and gone:
                    raise Refusal("the job has ended while this host came to it")
                if gone or time.monotonic() > deadline:
                    raise Refusal(
                        f"host {', '.join(gone or missing)} has gone at the start of the job; start again"
                    )
                time.sleep(_AGAIN)
                continue
            # Two hosts share a directory if each sees the other's file.
            groups: dict[str, list[int]] = {}
            for rank, seat in enumerate(plan.seats):
                first = next(host for host in views if seat.host in views[host] and host in views[seat.host])
                groups.setdefault(first, []).append(rank)
            return tuple(map(tuple, groups.values()))
        raise InterruptedError

    def _file(self, id: str) -> Path:
        return self._run_dir / f".agent-{id}"


def open_shared_run_dir(run_dir: Path, job: str) -> tuple[Path, int]:
    """Open a run directory as `preflight.open_run_dir` does, but agents of the same job may share
    it. Old markers are removed later, when it is known that a job begins: a host that rejoins a
    running job finds the markers of that job."""
    run_dir, lock = make_run_dir(run_dir)
    try:
        first = _lock(lock, fcntl.LOCK_EX)
        if first and _job_of(run_dir) not in (None, job):
            # Of an earlier job, which has ended: the next agent of this job would think that it runs.
            FILES.remove(run_dir / PLACEMENT)
        deadline = time.monotonic() + _TURN
        while not _lock(
            lock, fcntl.LOCK_SH
        ):  # another agent may hold the exclusive lock for a moment, as above
            if time.monotonic() > deadline:
                raise Refusal(f"run directory {run_dir} is in use by a running job; give another --run-dir")
            time.sleep(_AGAIN)
        if not first and (other := _job_of(run_dir)) not in (None, job):
            raise Refusal(f"run directory {run_dir} is in use by job {other}; give another --run-dir")
    except Refusal:
        os.close(lock)
        raise
    except OSError:
        pass  # a file system without locks
    return run_dir, lock


def may_be_running(run_dir: Path, job: str) -> bool:
    """Whether a job of this name has used the directory. The rendezvous decides whether it still
    runs: after a power cut a host finds its own files there, and no lock."""
    return _job_of(run_dir) == job


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _job_of(run_dir: Path) -> str | None:
    known = _placement(run_dir)
    return str(known["job"]) if known else None


def _placement(run_dir: Path) -> dict[str, Any] | None:
    """The placement file as a dict; None if it is missing or is no placement."""
    try:
        known = json.loads(FILES.read(run_dir / PLACEMENT) or b"null")
    except ValueError:
        return None
    return known if isinstance(known, dict) and {"job", "hosts", "ranks"} <= known.keys() else None


def write_placement(
    run_dir: Path, job: str, hosts: Mapping[str, Mapping[str, str]], seats: Mapping[int, Seat], later: bool
) -> None:
    """Write the record of which rank sits where. It holds all ranks that there have been."""
    facts: dict[str, Any] = {
        "job": job,
        "hosts": {host: facts["address"] for host, facts in hosts.items()},
        "ranks": {str(rank): {"host": seat.host, "slot": seat.slot} for rank, seat in sorted(seats.items())},
    }
    known = _placement(run_dir) if later else None
    if known is not None and known["job"] == job:
        # Ranks and hosts that were gone before this host came are known from the file alone.
        facts = {"job": job, **{name: known[name] | facts[name] for name in ("hosts", "ranks")}}
    FILES.replace(run_dir / PLACEMENT, (json.dumps(facts, indent=2) + "\n").encode())
