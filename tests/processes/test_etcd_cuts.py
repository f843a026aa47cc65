"""Hosts that are cut off, bad cables and lost members of etcd: no split decision, and no healthy rank dies."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from etcd_lab import LabRanks
from recover_lab.lab.hosts import Direction, Host, Lab

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning"),
    pytest.mark.usefixtures("a_lab_can_be_made_here"),
]
HOSTS = [[0, 1], [2, 3], [4, 5]]
EVERYONE = [0, 1, 2, 3, 4, 5]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Lab(hosts=3, shared=[tmp_path]) as lab:
        yield lab


def ranks_of(host: Host) -> list[int]:
    return HOSTS[int(host.name[1:]) - 1]


def all_but(host: Host) -> list[int]:
    return [rank for rank in EVERYONE if rank not in ranks_of(host)]


def gone(host: Host) -> bool:
    """Whether the agent of this host and all its ranks are gone."""
    return not any("etcd_host.py" in command for command in host.processes().values())


@pytest.mark.guarantee(
    "On etcd",
    "A host that is cut off, also in one direction, never commits again, ends itself and does not rejoin "
    "when the cable is fixed.",
)
@pytest.mark.guarantee("Several hosts", "A host that is cut off never commits again and ends itself.")
def test_isolated_host_never_commits_again_and_does_not_rejoin(lab: Lab, tmp_path: Path) -> None:
    """With etcd's leader on it. Replicas of two, so that each vote is one for a whole host."""
    with LabRanks(lab, tmp_path, HOSTS, replica_size=2) as ranks:
        ranks.commit(EVERYONE)
        lost = ranks.leader()
        lost.cut()
        ranks.commit(all_but(lost))
        before = ranks.commits(ranks_of(lost))  # the host has been declared lost by now
        lost.heal()
        ranks.wait(lambda: gone(lost))
        assert {ranks.end(rank) for rank in ranks_of(lost)} <= {"fenced", ""}, (
            "by themselves, or with their agent"
        )
        assert ranks.commits(ranks_of(lost)) == before
        ranks.commit(all_but(lost))
        ranks.finish(all_but(lost))


@pytest.mark.guarantee(
    "On etcd", "The loss or pause of one of three etcd members, also of the leader, costs no rank."
)
def test_loss_of_one_of_three_etcd_members_costs_no_rank(lab: Lab, tmp_path: Path) -> None:
    """The leader is stopped for longer than a lease; then the leader of that time is killed."""
    with LabRanks(lab, tmp_path, HOSTS) as ranks:
        ranks.commit(EVERYONE)
        leader = ranks.leader()
        ranks.signal_member(leader, signal.SIGSTOP)
        ranks.commit(EVERYONE)
        time.sleep(3)
        ranks.signal_member(leader, signal.SIGCONT)  # it may revoke leases that it takes for expired
        ranks.commit(EVERYONE)
        ranks.signal_member(ranks.leader(), signal.SIGKILL)
        ranks.commit(EVERYONE, 20)
        assert len(ranks.diary(0, "census")) == 1, "somebody was lost"
        ranks.finish(EVERYONE)


@pytest.mark.guarantee(
    "On etcd",
    "A host that is cut off, also in one direction, never commits again, ends itself and does not rejoin "
    "when the cable is fixed.",
)
@pytest.mark.soak
@pytest.mark.parametrize("direction", ["in", "out", "both"])
@pytest.mark.parametrize("on_leader", [True, False])
def test_cut_in_one_direction_counts_as_a_cut(
    lab: Lab, tmp_path: Path, direction: Direction, on_leader: bool
) -> None:
    with LabRanks(lab, tmp_path, HOSTS, patience=12.0) as ranks:
        ranks.commit(EVERYONE)
        leader = ranks.leader()
        lost = next(host for host in lab if (host is leader) == on_leader)
        lost.cut(direction)
        ranks.commit(all_but(lost))
        ranks.wait(lambda: gone(lost))  # the host ends itself, though it never learns why
        ranks.commit(all_but(lost))
        lost.heal()
        ranks.commit(all_but(lost))
        ranks.finish(all_but(lost))


@pytest.mark.guarantee("On etcd", "Lost frames, delays and an etcd outage of 20 seconds cost no rank.")
@pytest.mark.soak
@pytest.mark.parametrize(
    "cable", [{"loss": 0.2}, {"delay_ms": 200.0}, {"delay_ms": 50.0, "loss": 0.1}], ids=str
)
@pytest.mark.parametrize("hosts", [1, 3])
def test_bad_cable_costs_no_rank(lab: Lab, tmp_path: Path, cable: dict[str, float], hosts: int) -> None:
    """The cable of one host, or of all, is bad for 30 seconds."""
    if hosts == 3:
        cable = {name: value / 2 for name, value in cable.items()}  # a frame meets two cables on its way
    with LabRanks(lab, tmp_path, HOSTS) as ranks:
        ranks.commit(EVERYONE)
        for host in list(lab)[:hosts]:
            host.shape(**cable)
        before, deadline = ranks.commits(EVERYONE), time.monotonic() + 30
        while time.monotonic() < deadline:
            time.sleep(0.5)
            assert len(ranks.diary(0, "census")) == 1, ranks.picture()
        assert all(after > before[rank] for rank, after in ranks.commits(EVERYONE).items())
        for host in lab:
            host.heal()
        ranks.commit(EVERYONE)
        assert len(ranks.diary(0, "census")) == 1, "somebody was lost"
        ranks.finish(EVERYONE)


@pytest.mark.guarantee("On etcd", "Lost frames, delays and an etcd outage of 20 seconds cost no rank.")
@pytest.mark.soak
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_etcd_outage_of_twenty_seconds_costs_no_rank(lab: Lab, tmp_path: Path, how: str) -> None:
    with LabRanks(lab, tmp_path, HOSTS) as ranks:
        ranks.commit(EVERYONE)
        for host in lab:
            ranks.signal_member(host, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
        if how == "killed":
            for server in ranks.servers.values():
                server.kill()
        time.sleep(20)
        for host in lab:
            if how == "stopped":
                ranks.signal_member(host, signal.SIGCONT)
            else:
                ranks.start_member(host)
        ranks.commit(EVERYONE)
        assert len(ranks.diary(0, "census")) == 1, "somebody was lost"
        ranks.finish(EVERYONE)


@pytest.mark.guarantee(
    "On etcd", "The loss or pause of one of three etcd members, also of the leader, costs no rank."
)
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_etcd_members_restarted_in_turn_cost_no_rank(
    lab: Lab, tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    """Members restart one after the other, often the leader; never two at once. The pauses go into the report."""
    with LabRanks(lab, tmp_path, HOSTS, replica_size=2) as ranks:
        ranks.commit(EVERYONE)
        for turn in range(6):
            host = ranks.leader() if turn % 2 == seed % 2 else lab[f"h{1 + (turn + seed) % 3}"]
            struck = time.time()
            if turn % 3 == 2:
                ranks.servers[host.name].kill()  # its member goes with it
                ranks.commit(EVERYONE)
                ranks.start_member(host)
            else:
                ranks.signal_member(host, signal.SIGSTOP)
                time.sleep(1 + turn)
                ranks.signal_member(host, signal.SIGCONT)
            ranks.commit(EVERYONE)
            record_property(f"pause after turn {turn}", ranks.longest_pause(0, struck))
            assert len(ranks.diary(0, "census")) == 1, f"somebody was lost in turn {turn}"
        ranks.finish(EVERYONE)


@pytest.mark.guarantee(
    "On etcd", "A power cut takes only the ranks of its host, also with the etcd leader on it."
)
@pytest.mark.soak
def test_power_cut_takes_the_ranks_and_the_etcd_member_of_its_host(lab: Lab, tmp_path: Path) -> None:
    with LabRanks(lab, tmp_path, HOSTS) as ranks:
        ranks.commit(EVERYONE)
        lost = ranks.leader()
        lost.power_cut()
        ranks.commit(all_but(lost), 20)
        lost.power_on()
        ranks.commit(all_but(lost), 20)
        ranks.finish(all_but(lost))
