"""Hosts of a lab with a member of etcd on each, and ranks of the etcd fabric."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from etcd_ranks import EtcdRanks
from patience import wait_until
from recover_lab.lab import namespaces
from recover_lab.lab.hosts import Host, Lab

from recover.world.fabrics.etcd.client import EtcdClient, EtcdError

MEMBER = Path(__file__).parent / "programs" / "etcd_member.py"
PORT = 2379


class LabRanks(EtcdRanks):
    """`hosts`: the ranks of each, on h1, h2, ...; on the first `members` of them there is a member of etcd, too."""

    def __init__(
        self, lab: Lab, directory: Path, hosts: Sequence[Sequence[int]], members: int = 3, **options: Any
    ) -> None:
        self.lab, self.members = lab, [f"{host.address}:{PORT}" for host in lab][:members]
        super().__init__(",".join(self.members), "/recover/lab/", directory, hosts, **options)
        for scenario in self._scenarios:
            number = int(scenario["name"][1:]) + 1
            scenario |= {"name": f"h{number}", "address": lab[f"h{number}"].address}
        self.servers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> LabRanks:
        for host in list(self.lab)[: len(self.members)]:
            self.start_member(host)
        assert wait_until(lambda: all((self.directory / host / "pid").exists() for host in self.servers))
        super().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        pass  # everything ends with the lab

    def start_member(self, host: Host) -> None:
        directory = self.directory / host.name
        scenario = {
            "address": host.address,
            "port": PORT,
            "members": self.members,
            "directory": str(directory),
        }
        with open(self.directory / f"etcd-{host.name}.out", "wb") as out:
            self.servers[host.name] = host.start(
                [sys.executable, "-P", str(MEMBER), json.dumps(scenario)], stdout=out, stderr=out
            )

    def start(self, scenario: dict[str, Any], command: Sequence[str], out: Any) -> subprocess.Popen[bytes]:
        return self.lab[scenario["name"]].start(command, stdout=out, stderr=out)

    def etcd_processes(self, host: Host) -> list[int]:
        return [pid for pid, command in host.processes().items() if "--listen-peer-urls" in command]

    def signal_member(self, host: Host, how: signal.Signals) -> None:
        for pid in self.etcd_processes(host):
            os.kill(pid, how)

    def leader(self) -> Host:
        """The host of etcd's leader, as its own members see it."""
        while True:
            for host in list(self.lab)[: len(self.members)]:
                try:
                    status = self.at(
                        host,
                        lambda host=host: EtcdClient(f"{host.address}:{PORT}", patience=0.0).call(
                            "/v3/maintenance/status", {}
                        ),
                    )  # type: ignore[misc]
                except EtcdError:
                    continue
                if status.get("leader") == status["header"]["member_id"]:
                    return host
            time.sleep(0.1)

    @staticmethod
    def at(host: Host, action: Any) -> Any:
        """Run an action in the host's network namespace."""
        pidfd = os.pidfd_open(host.init)
        try:
            return namespaces.in_those_of(pidfd, namespaces.NET, action)
        finally:
            os.close(pidfd)

    def commits(self, ranks: Sequence[int]) -> dict[int, int]:
        return {rank: len(self.diary(rank, "commit")) for rank in ranks}

    def longest_pause(self, rank: int, since: float) -> float:
        """The longest time between two commits, in seconds, after this moment (of `time.time()`)."""
        times = [
            since,
            *(note["at"] for note in self.diary(rank, "commit") if note["at"] > since),
            time.time(),
        ]
        return max(later - before for before, later in pairwise(times))
