"""`recover faults matrix --hosts`: hosts, cables, agents and members of etcd struck at every location.

A cell is (location, what, hosts). Each launch serves as many as fit: a replica and a majority of etcd must be left.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recover.faults import Fault
from recover.faults.fault import OF_HOST
from recover.job.machine import machine
from recover.train.config import Config
from recover.train.preparation import prepare_run
from recover_lab.chaos.cells import PLACES, RECOVERIES, SETTLED, runs_extra
from recover_lab.chaos.matrix import insert, run_launches, slice_of, split_at_table
from recover_lab.chaos.on_hosts import TAKES_A_MEMBER, HostPlatform
from recover_lab.chaos.platforms import CampaignRun

WHATS = {
    "a rank": "kill",
    "power": "lab:power",
    "cable": "lab:cut",
    "agent killed": "lab:agent-kill",
    "agent stopped": "lab:agent-stop",
    "notice to leave": "lab:agent-leave",
    "leader of etcd killed": "lab:leader-kill",
    "leader of etcd stopped": "lab:leader-stop",
    "all of etcd stopped": "lab:etcd-stop",
}
LIMIT = 240.0  # seconds after which a launch counts as hung
EVENTS = 5  # of one launch, at most
NAME = "hosts"  # of the table on its page


@dataclass(frozen=True)
class HostCell:
    location: str
    what: str
    hosts: tuple[int, ...]  # struck at once


@dataclass
class HostLaunch:
    """One job, its faults, and the cells that they test."""

    alive: list[int]  # replicas
    members: int  # of etcd that may still be lost
    steps: int = 0
    faults: list[Fault] = field(default_factory=list)
    cells: set[HostCell] = field(default_factory=set)


def host_cells(hosts: int) -> list[HostCell]:
    """Ranks on every host; the first host, another one and, with four hosts, two at once; other targets once each."""
    last = hosts - 1
    chosen: dict[str, list[tuple[int, ...]]] = {
        "a rank": [(host,) for host in range(hosts)],
        "power": [(0,), (last,), *([(0, last)] if hosts > 3 else [])],
    }
    others: dict[str, list[tuple[int, ...]]] = {
        what: [(1 + number % last,)] for number, what in enumerate(WHATS) if what not in chosen
    }
    return [
        HostCell(location, what, where)
        for location in (*PLACES, *RECOVERIES)
        for what, wheres in (chosen | others).items()
        for where in wheres
    ]


def lay_out_hosts(cells: Sequence[HostCell], hosts: HostPlatform, config: Config) -> Iterator[HostLaunch]:
    """Launches that test all cells that can be tested."""
    missing = list(cells)
    while missing:
        launch = HostLaunch(list(range(config.replicas)), (len(hosts.members) - 1) // 2)
        for cell in missing:
            if len(launch.cells) < EVENTS and (faults := _event(cell, launch, hosts, config)):
                _add(cell, faults, launch, hosts, config)
        if not launch.cells:
            return  # no replica has extra work there
        missing = [cell for cell in missing if cell not in launch.cells]
        yield launch


def _event(cell: HostCell, launch: HostLaunch, hosts: HostPlatform, config: Config) -> list[Fault]:
    """The faults of a cell; none if this launch cannot test it any more."""
    action, alive = WHATS[cell.what], tuple(launch.alive)
    taken = sum(action in TAKES_A_MEMBER and host < len(hosts.members) for host in cell.hosts)
    taken = max(taken, action == "lab:leader-kill")
    name, _, detail = cell.location.partition(":")
    there = {
        host: set(hosts.replicas_on(hosts.names[host], config)) & {*alive} for host in range(len(hosts.names))
    }
    lost = [replica for host in cell.hosts for replica in there[host]] if action in OF_HOST else []
    first: list[Fault] = []
    step, able = launch.steps + 1, {*alive}
    if cell.location in RECOVERIES:
        # A replica of the other host that has most of them.
        host = max(there, key=lambda host: (len(there[host]) if host not in cell.hosts else -1, host))
        if host in cell.hosts or not there[host] or len(alive) < 2:
            return []
        companion = max(there[host])
        first, lost = [Fault(step, companion, "in-reduce")], [*lost, companion]
        if name == "extra":
            able = runs_extra("in-reduce", companion, alive, config.global_batch, config.policy)
    if taken > launch.members or not all(there[host] & able for host in cell.hosts):
        return []
    chosen = [
        min(there[host] & able) if action in OF_HOST else max(there[host] & able) for host in cell.hosts
    ]
    if len({*alive} - {*lost} - ({*chosen} if action == "kill" else set())) < 1:
        return []
    return first + [Fault(step, replica, name, 0, detail or None, action) for replica in chosen]


def _add(
    cell: HostCell, faults: list[Fault], launch: HostLaunch, hosts: HostPlatform, config: Config
) -> None:
    action = WHATS[cell.what]
    gone = {fault.replica for fault in faults if fault.lethal}
    if action in OF_HOST:
        gone |= {replica for host in cell.hosts for replica in hosts.replicas_on(hosts.names[host], config)}
    taken = sum(action in TAKES_A_MEMBER and host < len(hosts.members) for host in cell.hosts)
    launch.members -= max(taken, action == "lab:leader-kill")
    launch.alive = [replica for replica in launch.alive if replica not in gone]
    launch.faults += faults
    launch.cells.add(cell)
    launch.steps = faults[-1].step + SETTLED


def host_matrix(
    words: Sequence[str],
    hosts: HostPlatform,
    launches: int | None = None,
    write: Path | None = None,
    jobs: int = 1,
    cells: Sequence[HostCell] | None = None,
    skip: int = 0,
) -> int:
    """Returns 0 if every cell held, otherwise 1. Skips the first `skip` launches, and runs `launches` at most."""
    config = prepare_run(words, None, (), None).config
    hosts.check(config)
    if write is not None:
        split_at_table(write, NAME)
    whole = list(lay_out_hosts(cells or host_cells(len(hosts.names)), hosts, config))
    plan = slice_of(whole, launches, skip)
    theirs = [
        *words,
        f"steps={max(launch.steps for launch in plan)}",
        "checkpoint.every=1",
        "checkpoint.keep=1",
    ]
    config = prepare_run(theirs, None, (), None).config
    started = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="recover-matrix-calm-"))
    calm = hosts.run(CampaignRun(theirs, place / "calm", LIMIT))
    if laws := list(hosts.violations(calm, config, ())):
        raise ValueError(
            f"the run without faults already breaks invariants: {'; '.join(laws)}; see {calm.run_dir}"
        )
    try:

        def run(launch: HostLaunch, run_dir: Path, running: set[subprocess.Popen[bytes]]) -> list[str]:
            done = hosts.run(CampaignRun(theirs, run_dir, LIMIT * jobs, launch.faults, running))
            return list(hosts.violations(done, config, launch.faults, calm))

        broken = run_launches(plan, run, jobs)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    text = list(_summary(config, hosts, whole, plan, broken, time.monotonic() - started))
    print("\n".join(text))
    if write is not None:
        insert(write, NAME, text)
    return 1 if broken else 0


def _summary(
    config: Config,
    hosts: HostPlatform,
    whole: Sequence[HostLaunch],
    plan: Sequence[HostLaunch],
    broken: set[HostCell],
    seconds: float,
) -> Iterator[str]:
    served, reachable = (set[HostCell]().union(*(each.cells for each in some)) for some in (plan, whole))
    here = machine()
    yield (
        f"{len(hosts.names)} hosts, `parallel={config.parallel}`: {len(served - broken)} of {len(served)} cells held; "
        f"{sum(len(each.faults) for each in plan)} faults in {len(plan)} launches of {config.replicas} x "
        f"{config.replica_size} ranks, {seconds:.0f} s on {here['cores']} cores, torch {here['torch']}."
    )
    if untried := len(reachable - served):
        yield f"The other {untried} cells take {len(whole) - len(plan)} more launches, and were not tried."
    yield ""
    yield f"| location | {' | '.join(WHATS)} |"
    yield f"|---|{'---|' * len(WHATS)}"
    for location in (*PLACES, *RECOVERIES):
        rows = [{cell for cell in served if (cell.location, cell.what) == (location, what)} for what in WHATS]
        told = (f"{len(tried - broken)}/{len(tried)}" if tried else "-" for tried in rows)
        yield f"| `{location}` | {' | '.join(told)} |"
