"""Campaigns on the hosts of a lab, with an agent on each: faults also strike hosts, links, agents and etcd."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from recover.checkpoint import directory
from recover.faults import Fault, lab_requests
from recover.faults.draw import EVEN, EVERYWHERE, draw_by_clock, draw_schedule
from recover.faults.fault import LINKS, OF_HOST
from recover.faults.locations import AFTER_VERDICT, ANYTIME, IN_RECOVERY
from recover.faults.schedule import impossible, write_schedule
from recover.job.authentication import make_token_file
from recover.train.config import Config
from recover.train.preparation import prepare_run
from recover_lab.chaos.campaign import RETURN, last_struck, strike_joining_replicas
from recover_lab.chaos.host_agents import AgentLife, HostAgents, leftovers_on, show_stacks
from recover_lab.chaos.invariants import FinishedRun, violations
from recover_lab.chaos.lab_strikes import LEASE, LINK_TIMEOUT, PORT, LabStrikes
from recover_lab.chaos.platforms import CampaignRun
from recover_lab.lab.hosts import Host, Lab

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
    "lab:agent-leave": 3.0,
    "lab:leader-kill": 2.0,
}
CUT_LINKS = {"lab:link": 2.0, "lab:link-mute": 1.0}  # one of them, in one of four schedules
QUIET = {  # faults that cost no replica
    "lab:blink": 2.0,
    "lab:lossy": 1.0,
    "lab:slow": 1.0,
    "lab:leader-stop": 2.0,
    "lab:etcd-stop": 1.0,
    "pause:1": 1.0,
}
TO_JOINING_REPLICAS = {  # a fault that costs a host strikes a restarted one, which holds no member of etcd
    "kill": 5.0,
    "exit": 1.0,
    "stop": 1.0,
    "pause:0.5": 1.0,
    "lab:power": 2.0,
    "lab:cut": 1.0,
    "lab:agent-kill": 1.0,
    "lab:agent-stop": 1.0,
    "lab:agent-leave": 1.0,
    "lab:blink": 1.0,
    "lab:leader-stop": 1.0,
}
BY_CLOCK = {"kill": 2.0, "lab:power": 3.0, "lab:cut": 2.0, "lab:agent-kill": 1.0}
TAKES_A_MEMBER = (
    *OF_HOST,
    "lab:leader-kill",
    "lab:member-kill",
)  # a member that an agent has started ends with it
RDZV_PATIENCE = 12.0  # seconds; longer than any fault stops etcd
ENDS = 30.0  # seconds in which a lost host must be empty, after the others have ended
_CODES = {
    "lab:power": (-9,),
    "lab:agent-kill": (-9,),
    "lab:agent-stop": (1, 0),
    "lab:agent-leave": (0,),
}  # a stopped agent may be continued in time
_LOOK = 0.005  # seconds between two polls
# Python's message if it is interrupted before the first line of the program.
PYTHON_BEGINS = "Fatal Python error: init_"


@dataclass(frozen=True)
class FinishedHostRun:
    """A run on hosts that has ended."""

    run_dir: Path
    code: int  # 0, or -9 if it was ended after its limit
    places: Mapping[str, Path]  # the run directory of each host
    lives: tuple[AgentLife, ...]  # of all agents, in the order of their start
    leftovers: list[str] = field(default_factory=list)

    def first(self, host: str) -> FinishedRun:
        """The run as the first agent of that host left it."""
        life = self._began(host)
        return FinishedRun(self.places[host], life.code, life.process.pid)

    def struck(self, host: str) -> Fault | None:
        return self._began(host).struck

    @property
    def took(self) -> tuple[float, float]:
        """Seconds before and after the first step, by the records of the first host."""
        return self.first(next(iter(self.places))).took

    @property
    def joined(self) -> set[int]:
        return set().union(*(self.first(host).joined for host in self.places))

    def _began(self, host: str) -> AgentLife:
        return next(life for life in self.lives if life.host == host)


class HostPlatform:
    """Hosts of a lab, each with the same number of ranks; the first 3 or 5 hold a member of etcd.

    `shared`: all hosts see one run directory, as on a cluster's file system, even a host whose link is cut.
    `returns`: lost replicas are restarted wherever there are free slots, and lost hosts may restart.
    """

    def __init__(self, hosts: int, shared: bool = False, returns: bool = False) -> None:
        if hosts < 3:
            raise ValueError(f"--hosts is {hosts}; it takes 3 or more, so that etcd outlives the loss of one")
        self.names = [f"h{number + 1}" for number in range(hosts)]
        self.members = self.names[: 3 if hosts < 5 else 5]
        self._shared, self.returns = shared, returns

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

    # Faults.

    def schedule(self, config: Config, seed: int) -> tuple[Fault, ...]:
        """Draw a schedule as if each host were a replica with its ranks, so that one host is spared."""
        rng, each = random.Random(f"hosts/{seed}"), self.ranks_on_each(config)
        locations = EVERYWHERE if config.checkpoint.every == 1 else EVEN
        count, quiet = rng.randint(1, len(self.names) - 1), rng.randint(0, 2)
        last = last_struck(config) if self.returns else config.steps
        draw = partial(draw_schedule, len(self.names), each, steps=(1, last), locations=locations)
        drawn: list[Fault] = []
        if rng.random() < 0.2:  # faults by the clock strike at any instruction
            mean = rng.choice((0.3, 1.0, 3.0))
            drawn += draw_by_clock(len(self.names), each, seed, mtbf=mean, count=count, actions=BY_CLOCK)
        else:
            drawn += draw(2 * seed, count=count, actions=ACTIONS)
        if quiet:
            drawn += draw(2 * seed + 1, count=quiet, actions=QUIET)
        if rng.random() < 0.25:
            # No other fault may cost a replica: the members choose which host loses its replicas, and one host must
            # stay. And no cable may be bad for a while: a slow link does not count as broken.
            drawn = [
                fault for fault in drawn if fault.action in ("pause:1", "lab:leader-stop", "lab:etcd-stop")
            ]
            drawn += draw(2 * seed + 1, count=1, actions=CUT_LINKS)
        faults: list[Fault] = []
        for fault in self._with_etcd(drawn):
            replica, local = divmod(fault.replica * each + fault.local, config.replica_size)
            fault = replace(fault, replica=replica, local=local)
            if not list(impossible((*faults, fault))) and not self._unreachable(fault, faults, config):
                faults.append(fault)
        return (
            *faults,
            *(strike_joining_replicas(config, seed, TO_JOINING_REPLICAS) if self.returns else ()),
        )

    def _unreachable(self, fault: Fault, faults: Sequence[Fault], config: Config) -> bool:
        """Whether no rank of this host is left to reach that location of a recovery."""
        host = self.host_of(fault, config)
        return any(
            other.action in OF_HOST
            and self.host_of(other, config) == host
            and other.after is None
            and other.step <= fault.step
            for other in faults
        )

    def _with_etcd(self, drawn: Sequence[Fault]) -> Iterator[Fault]:
        """The drawn faults, with kills instead of those that would cost etcd its majority."""
        left = (len(self.members) - 1) // 2
        for fault in drawn:
            everywhere = fault.action == "lab:leader-kill"
            if fault.action in TAKES_A_MEMBER and (everywhere or fault.replica < len(self.members)):
                if not left:
                    fault = replace(fault, action="kill")
                else:
                    left -= 1
            yield fault

    def _felt(self, run: FinishedHostRun, faults: Sequence[Fault], config: Config) -> Iterator[Fault]:
        """The faults as replicas experience them. A host survives its agent for a while: the job may end first."""
        for fault in faults:
            if fault.action in LINKS:
                yield from self._felt_at_both_ends(fault, config)
                continue
            if fault.action not in OF_HOST:
                yield fault
                continue
            if fault.replica >= config.replicas:
                continue  # handled below, if it has struck
            for replica in self.replicas_on(self.host_of(fault, config), config):
                one = replace(fault, replica=replica, local=0, action="kill")
                if "agent" in fault.action or fault.after is not None:
                    one = replace(one, step=0, location=ANYTIME, detail=None, after=fault.after or 0.0)
                yield one
        for replica in sorted(set().union(*(life.cost for life in run.lives))):
            if replica >= config.replicas:  # a replica that joined later, on a lost host
                for local in range(config.replica_size):
                    yield Fault(0, replica, ANYTIME, local, after=0.0)

    def _felt_at_both_ends(self, fault: Fault, config: Config) -> Iterator[Fault]:
        """A broken link may cost the replicas of one host: the members decide which host, and the run may end
        first."""
        for name in self.names:
            for replica in self.replicas_on(name, config):
                yield Fault(0, replica, ANYTIME, 0, after=0.0)

    # Running.

    def run(self, job: CampaignRun) -> FinishedHostRun:
        """Run a job on a lab of its own, and end it after its limit."""
        config = prepare_run(job.words, None, (), None).config
        run_dir = job.run_dir.absolute()
        asked = run_dir / "asked"
        asked.mkdir(parents=True)
        (run_dir / "faults.yaml").write_text(write_schedule(job.faults))
        seen = [
            run_dir,
            Path.cwd(),
            *(Path(path).absolute().parent for path in (config.model, config.data.path) if path),
        ]
        places = {name: run_dir / ("all" if self._shared else name) for name in self.names}
        running = set() if job.running is None else job.running

        def start(host: Host, said: Path) -> subprocess.Popen[Any]:
            with open(said, "wb") as out:
                words = self._command(job.words, config, run_dir, job.faults)
                command = [*words, "--run-dir", str(places[host.name])]
                agent = host.start(command, stdout=out, stderr=out, env=_environment(asked))
            running.add(agent)
            return agent

        with Lab(len(self.names), shared=[path for path in seen if path.is_dir()]) as lab:
            agents = HostAgents(lab, start, run_dir, places, config, self.returns)
            strikes = LabStrikes(lab, agents, self.members, asked)
            deadline = time.monotonic() + (job.limit or float("inf"))
            try:
                while not agents.ended and (now := time.monotonic()) < deadline:
                    strikes.look(now)
                    agents.look(now)
                    time.sleep(_LOOK)
            finally:
                running.difference_update(life.process for life in agents.lives)
            hung = not all(life.ended for life in agents.lives)
            if hung:
                show_stacks(lab)
            leftovers = (
                []
                if hung
                else [f"{host.name}: {what}" for host in lab for what in leftovers_on(host, lab.shared, ENDS)]
            )
        return FinishedHostRun(run_dir, -9 if hung else 0, places, tuple(agents.lives), leftovers)

    def _command(
        self, words: Sequence[str], config: Config, run_dir: Path, faults: Sequence[Fault]
    ) -> list[str]:
        command = [sys.executable, "-P", "-m", "recover.cli", "train", *words]
        command += [f"faults={run_dir / 'faults.yaml'}", *(RETURN if self.returns else ())]
        if any(fault.action in LINKS for fault in faults):
            command.append(f"link_timeout={LINK_TIMEOUT:g}")
        command += ["--nnodes", str(len(self.names)), "--nproc-per-node", str(self.ranks_on_each(config))]
        command += ["--rdzv-endpoint", ",".join(f"{name}:{PORT}" for name in self.members)]
        command += ["--rdzv-id", "chaos", "--page", "off"]
        command += ["--token-file", str(make_token_file(run_dir / "token"))]
        return [*command, "--lease", f"{LEASE:g}", "--rdzv-patience", f"{RDZV_PATIENCE:g}"]

    # Invariants.

    def violations(
        self,
        run: FinishedHostRun,
        config: Config,
        faults: Sequence[Fault],
        calm: FinishedHostRun | None = None,
    ) -> Iterator[str]:
        if run.code:
            yield f"the agents of {[life.host for life in run.lives if life.code == -9]} have not ended"
            return
        yield from (f"{what} was left behind" for what in run.leftovers)
        undisturbed = calm.first(self.names[0]) if calm is not None else None
        felt, whole = tuple(self._felt(run, faults, config)), 0
        for name in self.names:
            laws: Iterator[str]
            left, fault = run.first(name), run.struck(name)
            mine = {rank for replica in self.replicas_on(name, config) for rank in _ranks(replica, config)}
            if fault is None and mine.intersection(left.ranks_that("done")):
                whole += 1
                laws = chain(violations(left, config, felt, undisturbed), _saved(left, config))
            else:
                laws = self._of_a_lost_host(left, fault, config, undisturbed)
            yield from (f"{name}: {law}" for law in laws)
        for life in run.lives:
            if life.late and life.code not in (codes := _codes(life)):
                yield f"{life.host}: {life.said.name}: exit code {life.code}, not {' or '.join(map(str, codes))}"
        if not whole:
            yield "no host has come to the end"

    def _of_a_lost_host(
        self, left: FinishedRun, fault: Fault | None, config: Config, calm: FinishedRun | None
    ) -> Iterator[str]:
        """A lost host has committed nothing that the others have not, and nothing after its fault."""
        if left.code not in (expected := _codes_after(fault)):
            yield f"exit code {left.code}, not {' or '.join(map(str, expected))}"
        steps = [] if self._shared else left.lines("steps.jsonl")
        kept = [(line["step"], line["microbatches"], line["data_digest"], line["loss"]) for line in steps]
        if calm is not None and config.samples == "exact" and config.reduction == "reproducible":
            told = calm.lines("steps.jsonl")[: len(kept)]
            if kept != [
                (line["step"], line["microbatches"], line["data_digest"], line["loss"]) for line in told
            ]:
                yield f"it has committed {kept}, and the run without faults {told}"
        if fault is not None and "agent" not in fault.action and fault.after is None:
            last = fault.step - (fault.location not in (*AFTER_VERDICT, *IN_RECOVERY))
            if kept and kept[-1][0] > last:
                yield f"it was struck by {fault}, and has committed step {kept[-1][0]}"


def _saved(left: FinishedRun, config: Config) -> Iterator[str]:
    """The last checkpoint is complete and holds the final parameters, even if its writer's host was lost."""
    if not config.checkpoint.every or left.code:
        return
    found = directory.latest(left.run_dir)
    if found is None or found.step != config.steps or not found.is_confirmed:
        yield f"the last checkpoint is {found}, not that of step {config.steps}"
        return
    try:
        found.verify()
    except directory.CheckpointError as error:
        yield str(error)
    if found.facts()["parameters_digest"] != left.summary["parameters_digest"]:
        yield f"{found.path} has other parameters than the summary"


def _ranks(replica: int, config: Config) -> range:
    return range(replica * config.replica_size, (replica + 1) * config.replica_size)


def _codes_after(fault: Fault | None) -> tuple[int, ...]:
    """Exit codes that the agent of a host with this fault may have."""
    codes = _CODES.get(fault.action, (1,)) if fault else (0,)
    # The agent may have been exiting already.
    return (*codes, 0) if fault is not None and (fault.after is not None or fault.over_a_join) else codes


def _codes(life: AgentLife) -> tuple[int, ...]:
    """Exit codes of an agent. An agent that starts as the job ends is refused, or ended while Python starts or
    exits."""
    codes = _codes_after(life.struck)
    if life.came_in:
        return codes
    no_python_yet = (1,) if life.dismissed and PYTHON_BEGINS in life.said.read_text() else ()
    return (*codes, 2, 128 + signal.SIGINT, -signal.SIGINT, *no_python_yet)


def _environment(asked: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RECOVER_")}
    return environment | {"TMPDIR": "/tmp", lab_requests.VARIABLE: str(asked)}
