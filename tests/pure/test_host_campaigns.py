"""Campaigns over hosts before anything is launched: what is drawn can strike, spares somebody, and leaves most of etcd;
and every law that a run on hosts breaks is told."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from recover.chaos.cells import PLACES, RECOVERIES
from recover.chaos.host_matrix import WHATS, host_cells, lay_out_hosts
from recover.chaos.invariants import Left
from recover.chaos.on_hosts import ACTIONS, QUIET, TAKES_A_MEMBER, Hosts, LeftOnHosts
from recover.faults import Fault, lab_requests, parse_fault, parse_faults
from recover.faults.fault import OF_HOST
from recover.faults.probe import Probe
from recover.faults.schedule import impossible
from recover.launch.preflight import Refusal, check_faults
from recover.train.config import Config, parse


def config_of(replicas: int, steps: int = 12, **more: str) -> Config:
    keys = {"replicas": str(replicas), "accum": "2", "steps": str(steps), "reduction": "reproducible"}
    return parse(keys | {"checkpoint.every": "1"} | more)


def check(faults: list[Fault] | tuple[Fault, ...], hosts: Hosts, config: Config, steps: int) -> None:
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


@pytest.mark.parametrize(("count", "replicas"), [(3, 3), (3, 6), (4, 4), (4, 8), (5, 5)])
def test_schedules_over_hosts_can_strike_spare_somebody_and_leave_most_of_etcd(
    count: int, replicas: int
) -> None:
    hosts, config = Hosts(count), config_of(replicas)
    schedules = [hosts.schedule(config, seed) for seed in range(400)]
    assert schedules == [hosts.schedule(config, seed) for seed in range(400)]
    for schedule in schedules:
        check(schedule, hosts, config, config.steps)
    drawn = {fault.action for schedule in schedules for fault in schedule}
    assert drawn == ACTIONS.keys() | QUIET.keys()
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


@pytest.mark.parametrize(
    ("count", "replicas", "said"),
    [(2, 4, "it takes 3 or more"), (3, 4, "each must take the same number of them; give replicas=3")],
)
def test_hosts_that_cannot_be_had_are_refused(count: int, replicas: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Hosts(count).check(config_of(replicas))


def test_what_a_lab_must_do_is_asked_of_it_and_refused_where_there_is_none(
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


def pretend(place: Path, dead: dict[str, Fault], ends: dict[str, int], steps: int = 4) -> LeftOnHosts:
    """What a healthy run on three hosts leaves, one replica on each, of which these were lost."""
    names, agents = ["h1", "h2", "h3"], {}
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
        agents[name] = Left(place / name, ends.get(name, 0), 999_990 + number)
    return LeftOnHosts(place, 0, agents, dead)


def test_every_law_that_a_run_on_hosts_breaks_is_told(tmp_path: Path) -> None:
    hosts, config = Hosts(3), config_of(3, steps=4, **{"checkpoint.every": "0"})
    (cut,) = faults = parse_faults(["3:1:vote=lab:cut"])
    calm = pretend(tmp_path / "calm", {}, {})
    good = pretend(tmp_path / "good", {"h2": cut}, {"h2": 1})

    def told(run: LeftOnHosts, said: str) -> None:
        laws = list(hosts.violations(run, config, faults, calm))
        assert any(said in law for law in laws), laws

    assert list(hosts.violations(good, config, faults, calm)) == []
    told(LeftOnHosts(good.run_dir, -9, good.agents, good.struck), "have not ended")
    told(
        LeftOnHosts(good.run_dir, 0, good.agents, good.struck, ["h2: sleep 9"]), "h2: sleep 9 was left behind"
    )
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
    gone = pretend(tmp_path / "gone", {"h1": cut, "h2": cut, "h3": cut}, {"h1": 1, "h2": 1, "h3": 1})
    told(gone, "no host has come to the end")
