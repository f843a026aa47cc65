"""Campaigns over hosts before anything is launched: drawn faults can strike, spare a replica, and leave most of etcd;
and every law that a run on hosts breaks is reported."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recover_lab.chaos.cells import PLACES, RECOVERIES
from recover_lab.chaos.host_agents import AgentLife, HostAgents
from recover_lab.chaos.host_matrix import WHATS, host_cells, lay_out_hosts
from recover_lab.chaos.on_hosts import (
    ACTIONS,
    CUT_LINKS,
    PYTHON_BEGINS,
    QUIET,
    TAKES_A_MEMBER,
    TO_JOINING_REPLICAS,
    FinishedHostRun,
    HostPlatform,
)

from recover.faults import Fault, lab_requests, parse_fault, parse_faults
from recover.faults.fault import OF_HOST
from recover.faults.probe import Probe
from recover.faults.schedule import impossible
from recover.launch.preflight import Refusal, check_faults
from recover.train.config import Config, parse


def config_of(replicas: int, steps: int = 12, **more: str) -> Config:
    keys = {"replicas": str(replicas), "accum": "2", "steps": str(steps), "reduction": "reproducible"}
    return parse(keys | {"checkpoint.every": "1"} | more)


def check(faults: list[Fault] | tuple[Fault, ...], hosts: HostPlatform, config: Config, steps: int) -> None:
    assert list(impossible(faults, config.replicas, config.replica_size, steps, 1)) == [], faults
    lost = {fault.replica for fault in faults if fault.lethal}
    members = Counter[str]()
    for fault in faults:
        host = hosts.host_of(fault, config)
        if fault.action in OF_HOST:
            lost |= set(hosts.replicas_on(host, config))
        if fault.action in TAKES_A_MEMBER and (host in hosts.members or fault.action == "lab:leader-kill"):
            members[host if fault.action in OF_HOST else str(fault)] += 1
    assert len(lost) < config.replicas, "somebody must be left"
    assert 2 * len(members) < len(hosts.members), "so must most of etcd"


@pytest.mark.guarantee(
    "Several hosts",
    "Faults of ranks, hosts, cables, agents and etcd at every location and at random keep every invariant "
    "and leave nothing on any host.",
)
@pytest.mark.parametrize(("count", "replicas"), [(3, 3), (3, 6), (4, 4), (4, 8), (5, 5)])
def test_host_schedules_can_strike_and_leave_a_survivor_and_most_of_etcd(count: int, replicas: int) -> None:
    hosts, config = HostPlatform(count), config_of(replicas)
    schedules = [hosts.schedule(config, seed) for seed in range(400)]
    assert schedules == [hosts.schedule(config, seed) for seed in range(400)]
    for schedule in schedules:
        check(schedule, hosts, config, config.steps)
    drawn = {fault.action for schedule in schedules for fault in schedule}
    assert drawn == ACTIONS.keys() | QUIET.keys() | CUT_LINKS.keys()
    first = {
        hosts.host_of(fault, config) for each in schedules for fault in each if fault.action == "lab:power"
    }
    assert first == set(hosts.names), "no host is special"
    launches = list(lay_out_hosts(host_cells(count), hosts, config))
    served = set().union(*(launch.cells for launch in launches))
    assert {cell.location for cell in set(host_cells(count)) - served} <= {"extra"}, "not all have extra work"
    assert {(cell.location, cell.what) for cell in served} >= {
        (location, what) for location in (*PLACES, *RECOVERIES[:-1]) for what in WHATS
    }
    for launch in launches:
        check(launch.faults, hosts, config, launch.steps)
        assert any(len(cell.hosts) == 2 for cell in served) == (count > 3)


def test_host_schedules_strike_rejoining_replicas() -> None:
    hosts, config = HostPlatform(3, returns=True), config_of(3, steps=300)
    schedules = [hosts.schedule(config, seed) for seed in range(300)]
    for schedule in schedules:
        check([fault for fault in schedule if fault.replica < 3], hosts, config, config.steps // 2)
        assert list(impossible(schedule, 3, 1, 300, 1, later=1000)) == []
    later = {fault.action for each in schedules for fault in each if fault.replica >= 3}
    assert later == TO_JOINING_REPLICAS.keys()


@pytest.mark.parametrize(
    ("count", "replicas", "said"),
    [(2, 4, "it takes 3 or more"), (3, 4, "each must take the same number of them; give replicas=3")],
)
def test_impossible_hosts_are_refused(count: int, replicas: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        HostPlatform(count).check(config_of(replicas))


def test_lab_fault_is_requested_from_the_lab_and_refused_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = parse_fault("3:1:vote=lab:blink")
    monkeypatch.delenv(lab_requests.VARIABLE, raising=False)
    with pytest.raises(Refusal, match=r"3:1.0:vote=lab:blink is done by a lab, and this job runs on none"):
        check_faults([str(fault)], 2, 1)
    monkeypatch.setenv(lab_requests.VARIABLE, str(tmp_path))
    monkeypatch.setattr(lab_requests, "PATIENCE", 0.05)
    check_faults([str(fault)], 2, 1)
    probe = Probe(1, 0, [fault])
    probe.step = 3
    with pytest.raises(RuntimeError, match="no lab has done it"):
        probe("vote")
    assert lab_requests.asked_for(tmp_path) == [fault]
    lab_requests.is_done(tmp_path, fault)
    assert lab_requests.asked_for(tmp_path) == []
    lab_requests.have_done(fault)


def pretend(place: Path, dead: dict[str, Fault], ends: dict[str, int], steps: int = 4) -> FinishedHostRun:
    """The files of a healthy run on three hosts, one replica on each, of which these were lost."""
    names, lives = ["h1", "h2", "h3"], []
    for number, name in enumerate(names):
        (place / name / "ranks").mkdir(parents=True)
        done = min(steps, dead[name].step - 1) if name in dead else steps
        lines = [
            {"step": i, "microbatches": 6, "loss": 1.0 / i, "data_digest": f"s{i}"}
            for i in range(1, done + 1)
        ]
        (place / name / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        incidents = [
            {"step": fault.step, "epoch": 2 + n, "dead_replicas": [names.index(host)]}
            for n, (host, fault) in enumerate(dead.items())
        ]
        (place / name / "incidents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in incidents))
        (place / name / "summary.json").write_text(json.dumps({"parameters_digest": "d"}))
        for other in range(3):
            if names[other] not in dead and name not in dead:
                (place / name / "ranks" / f"{other}.end").write_text('{"end": "done"}')
        lives.append(life(name, ends.get(name, 0), place, 999_990 + number, dead.get(name)))
    return FinishedHostRun(place, 0, {name: place / name for name in names}, tuple(lives))


def life(
    host: str,
    code: int,
    place: Path,
    pid: int = 999_999,
    struck: Fault | None = None,
    said: str | None = None,
) -> AgentLife:
    """The life of an agent that has ended; if it has `said` something, of one that came later."""
    (said_in := place / f"{host}.{pid}.out").write_text(said or "")
    process: Any = SimpleNamespace(returncode=code, pid=pid, poll=lambda: code)
    return AgentLife(host, process, said_in, late=said is not None, struck=struck)


@pytest.mark.guarantee(
    "Several hosts",
    "Faults of ranks, hosts, cables, agents and etcd at every location and at random keep every invariant "
    "and leave nothing on any host.",
)
def test_host_campaign_reports_every_broken_invariant(tmp_path: Path) -> None:
    hosts, config = HostPlatform(3), config_of(3, steps=4, **{"checkpoint.every": "0"})
    (cut,) = faults = parse_faults(["3:1:vote=lab:cut"])
    calm = pretend(tmp_path / "calm", {}, {})
    good = pretend(tmp_path / "good", {"h2": cut}, {"h2": 1})

    def told(run: FinishedHostRun, said: str) -> None:
        laws = list(hosts.violations(run, config, faults, calm))
        assert any(said in law for law in laws), laws

    assert list(hosts.violations(good, config, faults, calm)) == []
    told(replace(good, code=-9), "have not ended")
    told(replace(good, leftovers=["h2: sleep 9"]), "h2: sleep 9 was left behind")
    told(pretend(tmp_path / "code", {"h2": cut}, {"h2": 0}), "h2: exit code 0, not 1")
    told(pretend(tmp_path / "other-code", {"h2": cut}, {"h2": 1, "h3": 1}), "h3: exit code 1")
    told(
        pretend(tmp_path / "bystander", {"h3": cut}, {"h3": 1}),
        "replicas [2] were lost, and nothing was scheduled",
    )
    told(pretend(tmp_path / "nobody", {}, {}), "replicas [1] were not lost as scheduled")
    late = pretend(tmp_path / "late", {"h2": cut}, {"h2": 1})
    lines = (calm.run_dir / "h1" / "steps.jsonl").read_text().splitlines(keepends=True)
    (late.run_dir / "h2" / "steps.jsonl").write_text("".join(lines[:3]))
    told(late, "h2: it was struck by 3:1.0:vote=lab:cut, and has committed step 3")
    (late.run_dir / "h2" / "steps.jsonl").write_text(lines[0] + lines[1].replace("s2", "s9"))
    told(late, "h2: it has committed")
    came = "job j is at work, on h1, h3; this host brings free slots"
    back = parse_fault("5joined:5.0:vote=lab:cut")
    for code, word, struck, is_right in (
        (0, came, None, True),
        (1, f"{PYTHON_BEGINS}import_site: Failed to import the site module", None, True),  # struck too soon
        (1, "Traceback", None, False),
        (2, "refused", None, True),
        (130, "not in yet", None, True),
        (2, came, None, False),
        (1, came, None, False),
        (1, came, back, True),
        (3, came, back, False),
    ):
        more = (*good.lives, replace(life("h2", code, tmp_path, struck=struck, said=word), dismissed=True))
        laws = list(hosts.violations(replace(good, lives=more), config, faults, calm))
        assert (not laws) == is_right, (code, word, laws)
    gone = pretend(tmp_path / "gone", {"h1": cut, "h2": cut, "h3": cut}, {"h1": 1, "h2": 1, "h3": 1})
    told(gone, "no host has come to the end")


class PretendedHost:
    """A host whose power a test can switch on."""

    def __init__(self, name: str) -> None:
        self.name, self.up = name, True

    def power_on(self) -> None:
        self.up = True


def test_lost_host_rejoins_is_lost_again_and_leaves_when_it_is_too_late(tmp_path: Path) -> None:
    lab: Any = [PretendedHost(name) for name in ("h1", "h2")]
    started: list[Any] = []

    def start(host: Any, said: Path) -> Any:
        process = SimpleNamespace(returncode=None, signals=[])
        process.poll = lambda: process.returncode
        process.send_signal = process.signals.append
        said.write_text("")
        started.append(process)
        return process

    for host in lab:
        (tmp_path / host.name).mkdir()
        seats = {"0": {"host": "h1"}, "1": {"host": "h2"}, "4": {"host": "h2"}, "5": {"host": "h2"}}
        (tmp_path / host.name / "hosts.json").write_text(json.dumps({"ranks": seats}))
    places = {host.name: tmp_path / host.name for host in lab}
    agents = HostAgents(lab, start, tmp_path, places, config_of(4), returns=True)
    power, again, first = parse_faults(
        ["3:1:vote=lab:power", "5joined:5:vote=lab:cut", "4joined:4:vote=lab:cut"]
    )
    assert not agents.strike("h2", first, now=1.0), "it holds a member of etcd, or is the one that is spared"
    assert agents.host_of(power) == "h2"
    assert agents.strike("h2", power, now=1.0)
    assert agents["h2"].cost == {1, 4, 5}
    assert not agents.is_given_up("h2", 2.0)
    (tmp_path / "h1" / "incidents.jsonl").write_text('{"step": 3, "dead_replicas": [1]}\n')
    assert agents.is_given_up("h2", 2.0)
    lab[1].up, started[1].returncode = False, -9
    agents.look(1.0)
    assert len(agents.lives) == 2, "it takes a moment"
    assert not agents.ended
    agents.look(100.0)
    assert (len(agents.lives), lab[1].up, agents["h2"].late) == (3, True, True)
    assert agents.strike("h2", again, now=100.0)
    assert not agents.strike("h2", again, now=100.0), "once"
    started[2].returncode = 1
    agents.look(200.0)
    assert len(agents.lives) == 4
    agents.look(201.0)
    assert started[3].signals == []
    started[0].returncode = 0
    agents.look(202.0)
    agents.look(203.0)
    assert started[3].signals == [2], "the job has ended, and it was never in"
    started[3].returncode = 130
    assert agents.ended
