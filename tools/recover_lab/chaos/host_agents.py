"""The agents of one run on a lab. Where replicas rejoin, lost hosts restart, too, each with a new agent."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recover.faults import Fault
from recover.job.process import rank_of
from recover.runs.records.job_log import PLACEMENT
from recover.runs.records.json_lines import read
from recover.train.config import Config
from recover.world.census import BROKEN_LINK
from recover_lab.lab.hosts import Host, Lab

STAYS_AWAY = 0.2  # share of lost hosts that do not restart
AWAY = 6.0  # seconds until a lost host restarts, at most; it must cope with still being a member of the job
GIVEN_UP = 15.0  # seconds after which a host counts as lost, even if none of its replicas was ever admitted
_IN = "this host brings free slots"  # log line of an agent that has joined a running job


@dataclass
class AgentLife:
    """One agent, from its start to its end."""

    host: str
    process: subprocess.Popen[Any]
    said: Path
    late: bool = False  # it started while the job was running
    struck: Fault | None = None  # the fault that its host is lost by
    at: float = 0.0  # time of that fault
    cost: frozenset[int] = frozenset()  # replicas with ranks on that host
    dismissed: bool = False  # the job had ended when it started

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def code(self) -> int:
        return -9 if self.process.returncode is None else int(self.process.returncode)

    @property
    def came_in(self) -> bool:
        return not self.late or _IN in self.said.read_text()


class HostAgents:
    """`start` is called with a host and the file for its agent's output; `places`: run directories by host."""

    def __init__(
        self,
        lab: Lab,
        start: Callable[[Host, Path], subprocess.Popen[Any]],
        said: Path,
        places: Mapping[str, Path],
        config: Config,
        returns: bool,
    ) -> None:
        self._lab, self._start, self._said = lab, start, said
        self._places, self._returns = places, returns
        self._first, self._size = config.replicas, config.replica_size
        self.lives: list[AgentLife] = []
        for host in lab:
            self._begin(host)

    def __getitem__(self, host: str) -> AgentLife:
        """The latest agent of that host."""
        return next(life for life in reversed(self.lives) if life.host == host)

    @property
    def ended(self) -> bool:
        return all(life.ended for life in self.lives) and not any(map(self._is_awaited, self._lab))

    def host_of(self, fault: Fault) -> str:
        return self._seats()[fault.replica * self._size + fault.local]

    def strike(self, host: str, fault: Fault, now: float) -> bool:
        """Mark the host as lost by this fault. False if the host must stay, or is lost already."""
        life, seats = self[host], self._seats()
        # The schedule was drawn before joining replicas had hosts; a majority of etcd, and one host, must stay.
        if life.struck is not None or (fault.replica >= self._first and not life.late):
            return False
        life.struck, life.at = fault, now
        life.cost = frozenset(rank // self._size for rank, seat in seats.items() if seat == host)
        return True

    def is_given_up(self, host: str, now: float) -> bool:
        """Whether the other hosts have recorded the loss of this host, have ended, or have had enough time."""
        life, others = self[host], [self[other.name] for other in self._lab if other.name != host]
        if all(other.ended for other in others) or now - life.at > GIVEN_UP:
            return True
        places = {self._places[other.host] for other in others}
        lines = (line for place in places for line in read(place / "incidents.jsonl").whole)
        return any(life.cost.intersection(line["dead_replicas"]) for line in lines)

    def have_evicted_for_a_link(self) -> bool:
        """Whether a host has recorded that replicas were evicted because of broken links."""
        lines = (
            line for place in set(self._places.values()) for line in read(place / "incidents.jsonl").whole
        )
        return any(why.startswith(BROKEN_LINK) for line in lines for why in line.get("evicted", {}).values())

    def look(self, now: float) -> None:
        """Restart lost hosts when their time has come; dismiss one that restarts after the job has ended."""
        if not self._returns:
            return
        over = self._is_over()
        for host in self._lab:
            life = self[host.name]
            if over and life.late and not life.ended and not life.dismissed and not life.came_in:
                life.dismissed = True
                life.process.send_signal(signal.SIGINT)
            elif self._is_awaited(host) and now - life.at > self._away(life):
                if not host.up:
                    host.power_on()
                self._begin(host, late=True)

    def _begin(self, host: Host, late: bool = False) -> None:
        number = sum(life.host == host.name for life in self.lives)
        said = self._said / f"{host.name}{f'.{number}' if number else ''}.out"
        self.lives.append(AgentLife(host.name, self._start(host, said), said, late))

    def _is_awaited(self, host: Host) -> bool:
        life = self[host.name]
        return (
            self._returns
            and life.struck is not None
            and life.ended
            and self._away(life) < float("inf")
            and not self._is_over()
        )

    def _away(self, life: AgentLife) -> float:
        """Seconds until the host restarts, drawn from its fault, so that a repeated run draws the same."""
        rng = random.Random(f"away/{life.struck}")
        return float("inf") if rng.random() < STAYS_AWAY else rng.uniform(0, AWAY)

    def _is_over(self) -> bool:
        return all(life.ended for life in self.lives if not life.late)

    def _seats(self) -> dict[int, str]:
        """Host of each rank, present and past, from the records of all hosts."""
        seats: dict[int, str] = {}
        for place in set(self._places.values()):
            try:
                ranks: dict[str, Any] = json.loads((place / PLACEMENT).read_text())["ranks"]
            except FileNotFoundError:
                continue
            seats |= {int(rank): seat["host"] for rank, seat in ranks.items()}
        return seats


def show_stacks(lab: Lab) -> None:
    """Let all ranks write their stacks to their logs."""
    for host in lab:
        for pid in host.processes():
            if rank_of(pid) is not None:
                try:
                    os.kill(pid, signal.SIGUSR2)
                except ProcessLookupError:
                    pass
    time.sleep(1)


def leftovers_on(host: Host, seen_by_all: Collection[str], patience: float) -> list[str]:
    """Processes and files left on a host whose job has ended, after waiting up to `patience` seconds for them to go."""
    if not host.up:
        return []
    deadline = time.monotonic() + patience
    while host.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    living = list(host.processes().values())
    find = ["find", "/tmp", "/dev/shm", "-mindepth", "1", "-maxdepth", "1"]
    listing = host.start(find, stdout=subprocess.PIPE, text=True).communicate(timeout=patience)[0]
    files = [
        path
        for path in listing.splitlines()
        if not any(Path(seen).is_relative_to(path) for seen in seen_by_all)
    ]
    return [*living, *files]
