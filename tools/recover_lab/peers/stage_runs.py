"""Runs each system of a comparison on several hosts, kills a rank, a host or a link, and returns the events.

A rank whose host or link is to be lost notes that it is inside the reduction, and waits there.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recover.job.authentication import make_token_file
from recover.launch import preflight
from recover.runs.records.kinds import Event
from recover_lab.locations import PYTHONPATH
from recover_lab.peers.ended import BenchmarkError
from recover_lab.peers.events import Events, read_events
from recover_lab.peers.host_stage import HostPool
from recover_lab.peers.runs import MONITOR_INTERVAL, PROGRAMS, TORCHRUN, configure, restart_job
from recover_lab.peers.scene import Scene
from recover_lab.peers.torchft_runs import (
    checked_events,
    lighthouse,
    replica_command,
    torchft_environment,
    torchft_job,
)

PATIENCE = 240.0  # seconds after which a run counts as hung
LOOK = 0.02  # seconds between two polls of the events
HELD = 120  # seconds that a victim waits for its fault
# The fastest settings of torchrun: a lost host is removed after 3 s, and the rendezvous does not wait for it.
RENDEZVOUS = "join_timeout=120,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
STORE_PORT, LIGHTHOUSE_PORT, ETCD_PORT = 29411, 29412, 29413
OUTSIDE = 10**6  # rank number of events that this process notes


@dataclass(frozen=True)
class Strike:
    """A fault in the reduction of a step: a rank is killed, or its host loses its power or its link."""

    what: str  # rank, host or link
    step: int
    replica: int
    host: str

    def words(self) -> str:
        return f"{self.step}:{self.replica}:in-reduce" + ("" if self.what == "rank" else f"=stall:{HELD}")


class HostProcesses:
    """The processes of one run."""

    def __init__(self, pool: HostPool, place: Path) -> None:
        self.pool, self.place = pool, place
        self._processes: list[subprocess.Popen[Any]] = []
        self._outside = Events(place, OUTSIDE)

    def start(
        self, host: str, command: Sequence[Any], environment: Mapping[str, str], log: str = ""
    ) -> subprocess.Popen[Any]:
        clean = preflight.clean_environment() | {"PYTHONPATH": PYTHONPATH} | dict(environment)
        with (self.place / f"{log or host}.log").open("ab") as output:
            process = self.pool.start(
                host, command, env=clean, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self._processes.append(process)
        return process

    def await_waiting(self, step: int, over: Callable[[], bool]) -> None:
        """Wait until the victim of this step waits for its fault."""
        self.wait(lambda: any(_is(event, "waiting", step) for event in self.events()), over)

    def strike(self, what: str, host: str, step: int) -> None:
        self._outside.note("failure", step=step, struck=what)
        (self.pool.cut if what == "link" else self.pool.power_cut)(host)

    def cut_between(self, one: str, other: str, step: int) -> None:
        """Cut the link between two hosts: both go on, and reach all others."""
        self._outside.note("failure", step=step, struck="between")
        self.pool.cut_between(one, other)

    def wait(self, condition: Callable[[], bool], over: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline or over():
                told = "\n".join(
                    f"{path.name}: {path.read_text(errors='replace')[-1500:]}"
                    for path in self.place.glob("*.log")
                )
                raise BenchmarkError(f"a run on several hosts did not finish:\n{told}")
            time.sleep(LOOK)

    def events(self) -> list[Event]:
        return read_events(self.place)

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # its children end with their host
                process.wait()


@contextmanager
def processes_on(pool: HostPool, place: Path) -> Iterator[HostProcesses]:
    place.mkdir(parents=True, exist_ok=True)
    processes = HostProcesses(pool, place)
    try:
        yield processes
    finally:
        processes.end()


def start_ours(
    processes: HostProcesses,
    per_host: int,
    lease: float,
    script: Path,
    arguments: Sequence[str],
    options: Sequence[Any] = (),
) -> dict[str, subprocess.Popen[Any]]:
    """Start one agent on each host; ranks are numbered in the order of the hosts. `options`: of `recover run`."""
    pool = processes.pool
    endpoint = f"{pool.address(pool.names[0])}:{ETCD_PORT}"
    agents = {}
    for number, host in enumerate(pool.names):
        command = [
            sys.executable,
            "-P",
            "-m",
            "recover.cli",
            "run",
            "--page",
            "off",
            "--run-dir",
            processes.place,
        ]
        command += ["--nnodes", len(pool.names), "--nproc-per-node", per_host, "--rdzv-endpoint", endpoint]
        command += ["--rdzv-id", "bench", "--host-name", host, "--lease", lease, *options]
        command += ["--token-file", make_token_file(processes.place / "token"), script, *arguments]
        agents[host] = processes.start(host, command, {"GROUP_RANK": str(number), "TMPDIR": "/tmp"})
    return agents


def run_ours_struck(
    pool: HostPool, scene: Scene, per_host: int, lease: float, strikes: Sequence[Strike], place: Path
) -> list[Event]:
    """Run ours with one fault after the other; the first host stays to the end."""
    config = configure(scene, place)
    with processes_on(pool, place) as processes:
        words = [config.model_dump_json(), "0", *(strike.words() for strike in strikes)]
        first = start_ours(processes, per_host, lease, PROGRAMS / "forward.py", words)[pool.names[0]]
        for strike in strikes:
            if strike.what != "rank":
                processes.await_waiting(strike.step, lambda: first.poll() is not None)
                processes.strike(strike.what, strike.host, strike.step)
        processes.wait(lambda: first.poll() is not None)
        if first.returncode:
            processes.wait(lambda: False, lambda: True)  # tells what was said
        return processes.events()


def run_ours_parted(
    pool: HostPool, scene: Scene, per_host: int, lease: float, link_timeout: float, step: int, place: Path
) -> list[Event]:
    """Run ours; after step `step` the last two hosts lose their link to each other. Both reach the first one, and etcd
    there."""
    config = configure(scene, place)
    with processes_on(pool, place) as processes:
        words = [config.model_dump_json(), "0"]
        options = ["--link-timeout", link_timeout]
        first = start_ours(processes, per_host, lease, PROGRAMS / "forward.py", words, options)[pool.names[0]]
        over = lambda: first.poll() is not None  # noqa: E731
        processes.wait(lambda: any(_is(event, "step-end", step) for event in processes.events()), over)
        one, other = pool.names[-2:]
        processes.cut_between(one, other, step)
        processes.wait(over)
        if first.returncode:
            processes.wait(lambda: False, lambda: True)  # tells what was said
        return processes.events()


def run_restart_struck(
    pool: HostPool, scene: Scene, per_host: int, timeout: float, place: Path
) -> list[Event]:
    """torchrun on every host: the last one loses its power, and the others restart from the last checkpoint."""
    ((step, _),) = scene.kills
    job = restart_job(scene, place) | {"struck_from_outside": True, "timeout": timeout}
    hosts = len(pool.names)
    with processes_on(pool, place) as processes:
        endpoint = f"{pool.address(pool.names[0])}:{STORE_PORT}"
        agents = []
        for host in pool.names:
            command: list[Any] = [sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes", f"{hosts - 1}:{hosts}"]
            command += ["--nproc-per-node", per_host, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
            command += ["--rdzv-id", "bench", "--rdzv-conf", RENDEZVOUS, "--max-restarts", 3]
            command += ["--monitor-interval", MONITOR_INTERVAL, "--local-addr", pool.address(host)]
            command += ["--log-dir", place / "torchrun", PROGRAMS / "restart.py", json.dumps(job)]
            environment = {**TORCHRUN, "STRUCK": "1" if host == pool.names[-1] else ""}
            agents.append(processes.start(host, command, environment))
        over = lambda: agents[0].poll() is not None  # noqa: E731
        processes.await_waiting(step, over)
        processes.strike("host", pool.names[-1], step)
        done = lambda: any(_is(event, "step-end", scene.steps) for event in processes.events())  # noqa: E731
        processes.wait(done, over)
        return processes.events()


def run_torchft_struck(
    pool: HostPool, scene: Scene, per_host: int, python: Path, way: str, place: Path
) -> list[Event]:
    """torchft: the last host loses its power; the lighthouse is on the first one."""
    ((step, _),) = scene.kills
    job = torchft_job(way, place, scene) | {"struck_from_outside": True}
    with processes_on(pool, place) as processes:
        environment = torchft_environment(pool.address(pool.names[0]), LIGHTHOUSE_PORT)
        processes.start(pool.names[0], lighthouse(python, LIGHTHOUSE_PORT), environment, "log")
        replicas = []
        for replica in range(scene.replicas):
            host = pool.names[replica // per_host]
            told = job | {"address": pool.address(host)}
            replicas.append(processes.start(host, replica_command(python, told, replica), environment, "log"))
        processes.await_waiting(step, lambda: replicas[0].poll() is not None)
        processes.strike("host", pool.names[-1], step)
        deadline = time.monotonic() + PATIENCE / 2
        while replicas[0].poll() is None and time.monotonic() < deadline:
            time.sleep(LOOK)  # the events until then suffice
        (place / "log").write_bytes((place / "log.log").read_bytes())
    return checked_events(place, scene)


def _is(event: Event, what: str, step: int) -> bool:
    return event["what"] == what and event["step"] == step
