"""Jobs on the hosts of a lab, by the real command: one agent on each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from patience import PATIENCE
from recover_lab.lab.hosts import Host, Lab

from recover.job.process import rank_of

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "programs"
ETCD = """
import time
from recover.world.fabrics.etcd.server import EtcdServer
with EtcdServer(address={!r}, port=2379):
    print("up", flush=True)
    time.sleep(3600)
"""


class LabJob:
    """`words`: what follows `recover`. Run directories lie in `place`, one for each host unless `shared`."""

    def __init__(self, lab: Lab, place: Path, words: Iterable[str], shared: bool = False) -> None:
        self.lab, self.place, self.words, self._shared = lab, place, list(words), shared
        if "--nnodes" in self.words and "--token-file" not in self.words:
            (place / "token").write_text("the token of a job in a lab\n")
            self.words[1:1] = ["--token-file", str(place / "token")]
        self.agents: dict[str, subprocess.Popen[Any]] = {}

    def start(
        self, *names: str, more: Iterable[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the agents of these hosts, or of all; `environment`: variables besides those of this process."""
        for host in [self.lab[name] for name in names] or list(self.lab):
            verb, *rest = self.words
            command = [
                sys.executable,
                "-P",
                "-m",
                "recover.cli",
                verb,
                "--run-dir",
                str(self.run_dir(host.name)),
                *more,
            ]
            variables = os.environ | {"TMPDIR": "/tmp", "PYTHONPATH": str(ROOT)} | (environment or {})
            with open(self.place / f"{host.name}.out", "ab") as out:
                self.agents[host.name] = host.start([*command, *rest], stdout=out, stderr=out, env=variables)

    def run_dir(self, host: str) -> Path:
        return self.place / ("run" if self._shared else f"run-{host}")

    def said(self, host: str) -> str:
        return (self.place / f"{host}.out").read_text()

    def picture(self) -> str:
        return "\n".join(f"== {name}\n{self.said(name)}" for name in self.agents)

    def wait(self, condition: Callable[[], object], what: str = "", seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.picture()}"
            time.sleep(0.02)

    def codes(self, *names: str) -> dict[str, int]:
        """The exit codes of these agents, or of all, when they have ended."""
        chosen = names or tuple(self.agents)
        self.wait(
            lambda: all(self.agents[name].poll() is not None for name in chosen), f"{chosen} do not end"
        )
        return {name: self.agents[name].returncode for name in chosen}

    def ranks(self, host: str) -> dict[int, int]:
        """The pids of the ranks that live on a host, as seen from here."""
        return {rank: pid for pid in self.lab[host].processes() if (rank := rank_of(pid)) is not None}

    def diary(self, rank: int, host: str, kind: str = "commit") -> list[dict[str, Any]]:
        path = self.run_dir(host) / f"diary-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [note for note in map(json.loads, lines) if note["kind"] == kind]

    def leftovers(self) -> dict[str, list[str]]:
        """Processes, and what is in memory and in the temporary directory of each host that has power."""
        return {host.name: found for host in self.lab if host.up and (found := self._left_on(host))}

    def _left_on(self, host: Host) -> list[str]:
        """Paths on this host, without those that all hosts see."""
        find = ["find", "/tmp", "/dev/shm", "-mindepth", "1", "-maxdepth", "1"]
        listing = host.start(find, stdout=subprocess.PIPE, text=True).communicate(timeout=PATIENCE)[0]
        seen = [self.place, *map(Path, self.lab.shared)]  # our own code, too, where it lies there
        files = [
            path for path in listing.splitlines() if not any(place.is_relative_to(path) for place in seen)
        ]
        return [*files, *host.processes().values()]


def etcd_on(lab: Lab, host: str) -> subprocess.Popen[Any]:
    """Start an etcd before the job, which no agent may take for its own."""
    program = ETCD.format(lab[host].address)
    server = lab[host].start([sys.executable, "-W", "ignore", "-c", program], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"up\n"
    return server


def strike(pid: int, how: signal.Signals) -> None:
    os.kill(pid, how)
