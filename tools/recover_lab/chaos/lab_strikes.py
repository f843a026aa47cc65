"""Applies faults of hosts, links and etcd in a lab, when a rank at the fault's location requests it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from recover.faults import Fault, lab_requests
from recover.faults.fault import CUT, LINKS, OF_HOST
from recover.world.fabrics.etcd.client import EtcdClient, EtcdError
from recover_lab.chaos.host_agents import HostAgents
from recover_lab.lab import namespaces
from recover_lab.lab.hosts import Direction, Host, Lab

PORT = 2379
LEASE = 4.0  # seconds: above the minimum, since all hosts share one machine
BLINK = 0.5  # seconds
LINK_TIMEOUT = 6.0  # seconds, of jobs whose links are cut
LINK_CUT = 90.0  # seconds after which a link heals without an eviction: the run may not have used it
BAD_FOR = 8.0  # seconds
BAD = {"lossy": (0.0, 0.2), "slow": (200.0, 0.0)}  # delay in milliseconds, share of lost packets
DIRECTIONS: dict[str, Direction] = {"cut": "both", "deaf": "in", "mute": "out"}
LEADER_STOPS = LEASE + 1.0
ETCD_STOPS = 5.0
_LOOK = 5.0  # seconds to wait for a leader of etcd


class LabStrikes:
    """Strikes requested faults. `members`: hosts with a member of etcd. `place`: directory of the requests
    (`faults.lab_requests`)."""

    def __init__(self, lab: Lab, agents: HostAgents, members: Sequence[str], place: Path) -> None:
        self._lab, self._agents, self._members, self._place = lab, agents, members, place
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._until_given_up: dict[str, Callable[[], object]] = {}
        self._cut_links: list[tuple[float, Host, Host]] = []  # until when at the latest, from, to

    def look(self, now: float) -> None:
        """Apply requested faults, and end those that have lasted long enough."""
        for fault in lab_requests.asked_for(self._place):
            self._strike(fault, now)
            lab_requests.is_done(self._place, fault)
        due, self._later = (
            [one for one in self._later if (one[0] <= now) == is_due] for is_due in (True, False)
        )
        for _, act in due:
            act()
        self._heal_links(now)
        for host in [host for host in self._until_given_up if self._agents.is_given_up(host, now)]:
            self._until_given_up.pop(host)()

    def _strike(self, fault: Fault, now: float) -> None:
        name = self._agents.host_of(fault)
        host, what = self._lab[name], fault.action.partition(":")[2]
        if fault.action in OF_HOST and not self._agents.strike(name, fault, now):
            return
        agent = self._agents[name]
        if what == "power":
            host.power_cut()
        elif fault.action in CUT:
            host.cut(DIRECTIONS[what])
            self._until_given_up[name] = host.heal
        elif fault.action in LINKS:
            self._cut_link(host, both=what == "link", now=now)
        elif what in ("blink", "lossy", "slow") and agent.struck is None:
            host.cut() if what == "blink" else host.shape(*BAD[what])
            mend = lambda: host.heal() if host.up and self._agents[name].struck is None else None  # noqa: E731
            self._later.append((now + (BLINK if what == "blink" else BAD_FOR), mend))
        elif what == "agent-kill":
            agent.process.kill()
        elif what == "agent-stop":
            agent.process.send_signal(signal.SIGSTOP)
            self._until_given_up[name] = lambda: agent.process.send_signal(signal.SIGCONT)
        elif what == "agent-leave":
            agent.process.send_signal(signal.SIGTERM)
        elif what == "member-kill":
            _signal(members_on(host), signal.SIGKILL)
        elif what == "leader-kill":
            _signal(members_on(self._leader() or host), signal.SIGKILL)
        elif what == "leader-stop":
            self._stop(members_on(self._leader() or host), now + LEADER_STOPS)
        elif what == "etcd-stop":
            self._stop([pid for each in self._lab for pid in members_on(each)], now + ETCD_STOPS)

    def _cut_link(self, host: Host, both: bool, now: float) -> None:
        """Cut the link between this host and the next one that has power."""
        names = [each.name for each in self._lab]
        place = names.index(host.name)
        there = [self._lab[name] for name in (*names[place + 1 :], *names[:place]) if self._lab[name].up]
        if not there or not host.up:
            return
        for one, other in ((host, there[0]), (there[0], host))[: 1 + both]:
            one.cut_link(other)
            self._cut_links.append((now + LINK_CUT, one, other))

    def _heal_links(self, now: float) -> None:
        is_evicted = bool(self._cut_links) and self._agents.have_evicted_for_a_link()
        for cut in [cut for cut in self._cut_links if is_evicted or cut[0] <= now]:
            self._cut_links.remove(cut)
            _, one, other = cut
            if one.up:  # a host forgets its neighbours when it loses its power
                one.heal_link(other)

    def _stop(self, pids: Sequence[int], until: float) -> None:
        _signal(pids, signal.SIGSTOP)
        self._later.append((until, lambda: _signal(pids, signal.SIGCONT)))

    def _leader(self) -> Host | None:
        """The host of etcd's leader; None if there is no leader for `_LOOK` seconds."""
        deadline = time.monotonic() + _LOOK
        while time.monotonic() < deadline:
            for host in (self._lab[name] for name in self._members if self._lab[name].up):
                if _leads(host):
                    return host
            time.sleep(0.05)
        return None


def members_on(host: Host) -> list[int]:
    """Processes of etcd on a host."""
    return [pid for pid, line in host.processes().items() if "--listen-client-urls" in line]


def _leads(host: Host) -> bool:
    pidfd = os.pidfd_open(host.init)
    client = EtcdClient(f"{host.address}:{PORT}", patience=0.0)
    try:
        ask = lambda: client.call("/v3/maintenance/status", {})  # noqa: E731
        status = namespaces.in_those_of(pidfd, namespaces.NET, ask)
    except EtcdError:
        return False
    finally:
        os.close(pidfd)
    return bool(status.get("leader") == status["header"]["member_id"])


def _signal(pids: Sequence[int], how: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, how)
        except ProcessLookupError:
            pass  # it has ended with its host
