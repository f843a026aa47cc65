"""A Ray cluster of real daemons on the hosts of a lab, one raylet on each. The first one is the head."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from patience import wait_until
from recover_lab.lab.hosts import Host, Lab

ROOT = Path(__file__).parents[1]
PORT = 6379
WATCH = """
import json, os, time, ray
while not ray.is_initialized():  # the head may still be starting
    try:
        ray.init(log_to_driver=False)
    except Exception as error:
        print(error, flush=True)
        time.sleep(1)
while True:
    alive = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    with open("nodes.tmp", "w") as file:
        json.dump(alive, file)
    os.replace("nodes.tmp", "nodes.json")
    time.sleep(0.5)
"""


class RayCluster:
    """Everything ends with the lab."""

    def __init__(self, lab: Lab, place: Path) -> None:
        self.lab, self.place = lab, place
        self._head = next(iter(lab))
        # The head notices the loss of a node after three silent seconds instead of half a minute.
        checks = {
            "initial_delay_ms": "1000",
            "period_ms": "1000",
            "timeout_ms": "2000",
            "failure_threshold": "3",
        }
        self._environment = os.environ | {f"RAY_health_check_{name}": value for name, value in checks.items()}
        self._environment |= {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TMPDIR": "/tmp",
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": f"{self._head.address}:{PORT}",
        }

    def start(self) -> None:
        self._ray(self._head, "--head", f"--port={PORT}", "--include-dashboard=false")
        with open(self.place / "watch.out", "w") as out:
            self.run([sys.executable, "-c", WATCH], stdout=out, stderr=out)
        self.wait(self.alive, "the head does not start")
        for host in list(self.lab)[1:]:
            self.start_node(host)
        self.wait(lambda: len(self.alive()) == len(self.lab), "not all nodes start")

    def start_node(self, host: Host) -> None:
        self._ray(host, f"--address={self._head.address}:{PORT}")

    def alive(self) -> dict[str, str]:
        """The nodes that the head takes for alive: their ids, by address."""
        path = self.place / "nodes.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def node_id(self, host: Host) -> str:
        return self.alive()[host.address]

    def run(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a driver on the head."""
        options = {"stdout": subprocess.PIPE, "text": True} | options
        return self._head.start(command, env=self._environment, cwd=self.place, **options)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        assert wait_until(condition), f"{what}\n{self.picture()}"

    def picture(self) -> str:
        return "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in self.place.glob("*.out"))

    def _ray(self, host: Host, *words: str) -> None:
        command = [
            "ray",
            "start",
            "--block",
            "--num-cpus=1",
            "--num-gpus=0",
            f"--node-ip-address={host.address}",
        ]
        command += ["--object-store-memory=80000000", "--disable-usage-stats"]
        with open(self.place / f"ray-{host.name}.out", "ab") as out:
            host.start([*command, *words], env=self._environment, cwd=self.place, stdout=out, stderr=out)
