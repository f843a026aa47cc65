"""Campaigns over the hosts of a lab: one agent on each, etcd among them; hosts, cables and etcd are struck, too."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from recover.chaos.invariants import Left, violations
from recover.chaos.lab_strikes import LEASE, PORT, LabStrikes
from recover.faults import Fault, lab_requests
from recover.faults.draw import EVEN, EVERYWHERE, draw_by_clock, draw_schedule
from recover.faults.fault import OF_HOST
from recover.faults.locations import AFTER_VERDICT, ANYTIME, IN_RECOVERY
from recover.faults.schedule import impossible, write_schedule
from recover.lab.hosts import Host, Lab
from recover.records.lines import read
from recover.saving import checkpoint
from recover.train.config import Config
from recover.train.preparation import prepare_run

ACTIONS = {
    "kill": 4.0,
    "exit": 1.0,
    "stop": 1.0,
    "pause:1": 1.0,
    "lab:power": 5.0,
    "lab:cut": 2.0,
    "lab:deaf": 1.0,
    "lab:mute": 1.0,
    "lab:agent-kill": 2.0,
    "lab:agent-stop": 2.0,
    "lab:leader-kill": 2.0,
}
QUIET = {  # these cost nobody
    "lab:blink": 2.0,
    "lab:lossy": 1.0,
    "lab:slow": 1.0,
    "lab:leader-stop": 2.0,
    "lab:etcd-stop": 1.0,
    "pause:1": 1.0,
}
BY_CLOCK = {"kill": 2.0, "lab:power": 3.0, "lab:cut": 2.0, "lab:agent-kill": 1.0}
TAKES_A_MEMBER = (*OF_HOST, "lab:leader-kill", "lab:member-kill")  # those that agents start end with them
RDZV_PATIENCE = 12.0  # seconds; longer than etcd is ever stopped
ENDS = 30.0  # seconds for a host that is lost to be empty, after the others have ended
_CODES = {"lab:power": (-9,), "lab:agent-kill": (-9,), "lab:agent-stop": (1, 0)}  # the last may end in time
_LOOK = 0.005  # seconds between two looks


@dataclass(frozen=True)
class LeftOnHosts:
    """A run on hosts that has ended."""

    run_dir: Path
    code: int  # 0, or -9: it took too long
    agents: dict[str, Left]
    struck: dict[str, Fault] = field(default_factory=dict)  # by host
    litter: list[str] = field(default_factory=list)

    @property
    def one(self) -> Left:
        return next(iter(self.agents.values()))


class Hosts:
    """So many; each takes the same number of ranks. The first ones hold a member of etcd, an odd number of them.

    `shared`: they see the same run directory, as on a cluster's file system, also one whose cable is cut.
    """

    def __init__(self, hosts: int, shared: bool = False) -> None:
        if hosts < 3:
            raise ValueError(f"--hosts is {hosts}; it takes 3 or more, so that etcd outlives the loss of one")
        self.names = [f"h{number + 1}" for number in range(hosts)]
        self.members = self.names[: 3 if hosts < 5 else 5]
        self._shared = shared

    def ranks_on_each(self, config: Config) -> int:
        ranks = config.replicas * config.replica_size
        if ranks % (len(self.names) * config.replica_size):
            raise ValueError(
                f"replicas={config.replicas} on {len(self.names)} hosts: each must take the same number of them; give "
                f"replicas={len(self.names) * max(1, config.replicas // len(self.names))}"
            )
        return ranks // len(self.names)

    def check(self, config: Config) -> None:
        self.ranks_on_each(config)

    def replicas_on(self, host: str, config: Config) -> range:
        each = self.ranks_on_each(config) // config.replica_size
        first = self.names.index(host) * each
        return range(first, first + each)

    def host_of(self, fault: Fault, config: Config) -> str:
        return next(host for host in self.names if fault.replica in self.replicas_on(host, config))

    # What strikes.

    def schedule(self, config: Config, seed: int) -> tuple[Fault, ...]:
        """Drawn as if each host were a replica, and its ranks those of it; so one host is spared."""
        rng, each = random.Random(f"hosts/{seed}"), self.ranks_on_each(config)
        locations = EVERYWHERE if config.checkpoint.every == 1 else EVEN
        count, quiet = rng.randint(1, len(self.names) - 1), rng.randint(0, 2)
        draw = partial(draw_schedule, len(self.names), each, steps=(1, config.steps), locations=locations)
        drawn: list[Fault] = []
        if rng.random() < 0.2:  # so that any instruction can be the last
            mean = rng.choice((0.3, 1.0, 3.0))
            drawn += draw_by_clock(len(self.names), each, seed, mtbf=mean, count=count, actions=BY_CLOCK)
        else:
            drawn += draw(2 * seed, count=count, actions=ACTIONS)
        if quiet:
            drawn += draw(2 * seed + 1, count=quiet, actions=QUIET)
        faults: list[Fault] = []
        for fault in self._with_etcd(drawn):
            replica, local = divmod(fault.replica * each + fault.local, config.replica_size)
            fault = replace(fault, replica=replica, local=local)
            if not list(impossible((*faults, fault))) and not self._unreachable(fault, faults, config):
                faults.append(fault)
        return tuple(faults)

    def _unreachable(self, fault: Fault, faults: Sequence[Fault], config: Config) -> bool:
        """A place in a recovery in which nobody of this host is, for it was lost before."""
        host = self.host_of(fault, config)
        return any(
            other.action in OF_HOST
            and self.host_of(other, config) == host
            and other.after is None
            and other.step <= fault.step
            for other in faults
        )

    def _with_etcd(self, drawn: Sequence[Fault]) -> Iterator[Fault]:
        """So that most of its members stay."""
        left = (len(self.members) - 1) // 2
        for fault in drawn:
            everywhere = fault.action == "lab:leader-kill"
            if fault.action in TAKES_A_MEMBER and (everywhere or fault.replica < len(self.members)):
                if not left:
                    fault = replace(fault, action="kill")
                else:
                    left -= 1
            yield fault

    def _felt(self, faults: Sequence[Fault], config: Config) -> Iterator[Fault]:
        """What replicas suffer by it. Without its agent a host has some time left, in which the job may end."""
        for fault in faults:
            if fault.action not in OF_HOST:
                yield fault
                continue
            for replica in self.replicas_on(self.host_of(fault, config), config):
                one = replace(fault, replica=replica, local=0, action="kill")
                if "agent" in fault.action or fault.after is not None:
                    one = replace(one, step=0, location=ANYTIME, detail=None, after=fault.after or 0.0)
                yield one

    # The run.

    def run(
        self,
        words: Sequence[str],
        run_dir: Path,
        limit: float | None,
        faults: Sequence[Fault] = (),
        running: set[subprocess.Popen[bytes]] | None = None,
    ) -> LeftOnHosts:
        """One `recover train` on a lab of its own, ended if it takes longer than `limit`."""
        config = prepare_run(words, None, (), None).config
        run_dir = run_dir.absolute()
        asked = run_dir / "asked"
        asked.mkdir(parents=True)
        (run_dir / "faults.yaml").write_text(write_schedule(faults))
        seen = [
            run_dir,
            Path.cwd(),
            *(Path(path).absolute().parent for path in (config.model, config.data.path) if path),
        ]
        with Lab(len(self.names), shared=[path for path in seen if path.is_dir()]) as lab:
            agents = {host.name: self._start(host, words, config, run_dir) for host in lab}
            if running is not None:
                running.update(agents.values())
            strikes = LabStrikes(
                lab,
                agents,
                self.members,
                asked,
                partial(self.host_of, config=config),
                partial(self._given_up, run_dir, config, agents),
            )
            deadline = time.monotonic() + (limit or float("inf"))
            try:
                while any(agent.poll() is None for agent in agents.values()) and time.monotonic() < deadline:
                    strikes.look(time.monotonic())
                    time.sleep(_LOOK)
            finally:
                if running is not None:
                    running.difference_update(agents.values())
            hung = any(agent.poll() is None for agent in agents.values())
            if hung:
                _show_stacks(lab)
            left = {
                name: Left(
                    self._place(run_dir, name),
                    -9 if agent.returncode is None else agent.returncode,
                    agent.pid,
                )
                for name, agent in agents.items()
            }
            litter = [] if hung else [f"{host.name}: {what}" for host in lab for what in _litter(host, lab)]
        return LeftOnHosts(run_dir, -9 if hung else 0, left, strikes.struck, litter)

    def _start(
        self, host: Host, words: Sequence[str], config: Config, run_dir: Path
    ) -> subprocess.Popen[Any]:
        command = [
            sys.executable,
            "-P",
            "-m",
            "recover.cli",
            "train",
            *words,
            f"faults={run_dir / 'faults.yaml'}",
        ]
        command += ["--nnodes", str(len(self.names)), "--nproc-per-node", str(self.ranks_on_each(config))]
        command += [
            "--rdzv-endpoint",
            ",".join(f"{name}:{PORT}" for name in self.members),
            "--rdzv-id",
            "chaos",
        ]
        command += ["--lease", f"{LEASE:g}", "--rdzv-patience", f"{RDZV_PATIENCE:g}", "--page", "off"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RECOVER_")}
        environment |= {"TMPDIR": "/tmp", lab_requests.VARIABLE: str(run_dir / "asked")}
        with open(run_dir / f"{host.name}.out", "wb") as out:
            return host.start(
                [*command, "--run-dir", str(self._place(run_dir, host.name))],
                stdout=out,
                stderr=out,
                env=environment,
            )

    def _place(self, run_dir: Path, host: str) -> Path:
        return run_dir / ("all" if self._shared else host)

    def _given_up(
        self, run_dir: Path, config: Config, agents: dict[str, subprocess.Popen[Any]], host: str
    ) -> bool:
        """The others say so in their records, or have ended."""
        mine = set(self.replicas_on(host, config))
        others = [name for name in self.names if name != host]
        if all(agents[name].poll() is not None for name in others):
            return True
        places = {self._place(run_dir, name) for name in others}
        lines = (line for place in places for line in read(place / "incidents.jsonl").whole)
        return any(mine & set(line["dead_replicas"]) for line in lines)

    # What must hold of it.

    def violations(
        self, run: LeftOnHosts, config: Config, faults: Sequence[Fault], calm: LeftOnHosts | None = None
    ) -> Iterator[str]:
        if run.code:
            yield f"the agents of {[name for name, left in run.agents.items() if left.code == -9]} have not ended"
            return
        yield from (f"{what} was left behind" for what in run.litter)
        undisturbed = calm.one if calm is not None else None
        felt, whole = tuple(self._felt(faults, config)), 0
        for name, left in run.agents.items():
            laws: Iterator[str]
            fault = run.struck.get(name)
            mine = {rank for replica in self.replicas_on(name, config) for rank in _ranks(replica, config)}
            if fault is None and mine.intersection(left.ranks_that("done")):
                whole += 1
                laws = chain(violations(left, config, felt, undisturbed), _saved(left, config))
            else:
                laws = self._of_a_lost_host(left, fault, config, undisturbed)
            yield from (f"{name}: {law}" for law in laws)
        if not whole:
            yield "no host has come to the end"

    def _of_a_lost_host(
        self, left: Left, fault: Fault | None, config: Config, calm: Left | None
    ) -> Iterator[str]:
        """It has committed nothing that the others have not, and nothing after it was struck."""
        action = fault.action if fault else ""
        expected = _CODES.get(action, (1,) if fault else (0,))
        if fault is not None and fault.after is not None:
            expected = (*expected, 0)  # it may have been on its way out
        if left.code not in expected:
            yield f"exit code {left.code}, not {' or '.join(map(str, expected))}"
        steps = [] if self._shared else left.lines("steps.jsonl")
        kept = [(line["step"], line["microbatches"], line["data_digest"], line["loss"]) for line in steps]
        if calm is not None and config.samples == "exact" and config.reduction == "reproducible":
            told = calm.lines("steps.jsonl")[: len(kept)]
            if kept != [
                (line["step"], line["microbatches"], line["data_digest"], line["loss"]) for line in told
            ]:
                yield f"it has committed {kept}, and the run without failures {told}"
        if fault is not None and "agent" not in fault.action and fault.after is None:
            last = fault.step - (fault.location not in (*AFTER_VERDICT, *IN_RECOVERY))
            if kept and kept[-1][0] > last:
                yield f"it was struck by {fault}, and has committed step {kept[-1][0]}"


def _saved(left: Left, config: Config) -> Iterator[str]:
    """The last state, whole and compared, whoever was writing when its host was lost."""
    if not config.checkpoint.every or left.code:
        return
    found = checkpoint.latest(left.run_dir)
    if found is None or found.step != config.steps or not found.is_confirmed:
        yield f"the last checkpoint is {found}, and should be that of step {config.steps}"
        return
    try:
        found.verify()
    except checkpoint.CheckpointError as error:
        yield str(error)
    if found.facts()["parameters_digest"] != left.summary["parameters_digest"]:
        yield f"{found.path} has other parameters than the summary says"


def _ranks(replica: int, config: Config) -> range:
    return range(replica * config.replica_size, (replica + 1) * config.replica_size)


def _show_stacks(lab: Lab) -> None:
    """Into the logs of the ranks: what they wait for."""
    for host in lab:
        for pid, line in host.processes().items():
            if "recover.launch.bootstrap" in line:
                try:
                    os.kill(pid, signal.SIGUSR2)
                except ProcessLookupError:
                    pass
    time.sleep(1)


def _litter(host: Host, lab: Lab) -> list[str]:
    """Processes and files of a host on which all has ended; it takes a moment until the last ones are gone."""
    if not host.up:
        return []
    deadline = time.monotonic() + ENDS
    while host.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    living = list(host.processes().values())
    find = ["find", "/tmp", "/dev/shm", "-mindepth", "1", "-maxdepth", "1"]
    listing = host.start(find, stdout=subprocess.PIPE, text=True).communicate(timeout=ENDS)[0]
    files = [
        path
        for path in listing.splitlines()
        if not any(Path(seen).is_relative_to(path) for seen in lab.shared)
    ]
    return [*living, *files]
