"""Wrong settings of several hosts are refused on the host that has them, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab_jobs import ROOT, LabJob, etcd_on
from patience import PATIENCE, wait_until
from recover_lab.lab import namespaces
from recover_lab.lab.hosts import Host, Lab

from recover.world.fabrics.etcd.client import EtcdClient

pytestmark = pytest.mark.usefixtures("a_lab_can_be_made_here")


WAITS = """
import time
from pathlib import Path
print("waits", flush=True)
while not Path(__file__).with_name("go on").exists():
    time.sleep(0.05)
"""


class Agents:
    """Agents on the hosts of a lab, all at once."""

    def __init__(self, place: Path) -> None:
        self._place = place
        (place / "script.py").write_text("print('ran')")
        (place / "token").write_text("a secret")
        (place / "another token").write_text("another secret")
        self._started: dict[tuple[str, str], subprocess.Popen[str]] = {}

    def start(self, job: str, host: Host, *words: str, script: str = "script.py", nnodes: str = "2") -> None:
        run_dir = self._place / f"{job}-{host.name}-{len(self._started)}"
        command = [sys.executable, "-P", "-m", "recover.cli", "run", "--rdzv-id", job, "--nnodes", nnodes]
        if "--rdzv-endpoint" not in words:
            command += ["--rdzv-endpoint", "h1:2379"]
        if "--token-file" not in words and job != "no-token":
            command += ["--token-file", str(self._place / "token")]
        command += ["--join-timeout", "5", "--run-dir", str(run_dir), *words, str(self._place / script)]
        self._started[job, host.name] = host.start(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"TMPDIR": "/tmp", "PYTHONPATH": str(ROOT)},
        )

    def first_to_end(self, job: str, *hosts: str) -> list[str]:
        """The hosts, in the order in which their agents end; only one of them need do so."""
        assert wait_until(lambda: any(self._ended(job, host) for host in hosts), PATIENCE)
        return sorted(hosts, key=lambda host: not self._ended(job, host))

    def _ended(self, job: str, host: str) -> bool:
        return self._started[job, host].poll() is not None

    def stop(self, job: str, host: str) -> None:
        self._started[job, host].send_signal(signal.SIGTERM)

    def end(self, job: str, host: str, code: int = 2) -> str:
        agent = self._started[job, host]
        said, _ = agent.communicate(timeout=PATIENCE)
        assert agent.returncode == code, said
        assert "Traceback" not in said
        return said


@pytest.mark.guarantee(
    "Several hosts", "Bad input is refused by name on its host and leaves nothing on hosts or in etcd."
)
def test_bad_input_is_refused_on_its_host_and_leaves_nothing(tmp_path: Path) -> None:
    with Lab(hosts=2, shared=[tmp_path]) as lab:
        server = etcd_on(lab, "h1")
        h1, h2 = lab
        agents = Agents(tmp_path)
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "script.py").write_text("print('ran something else')")
        (tmp_path / "waits.py").write_text(WAITS)

        agents.start("running", h1, script="waits.py", nnodes="1")
        agents.start("hosts", h1)
        agents.start("hosts", h2, nnodes="3")
        agents.start("script", h1)
        agents.start("script", h2, script="other/script.py")
        agents.start("size", h1, "--replica-size", "3")
        agents.start("size", h2, "--replica-size", "3")
        agents.start("name", h2, "--rdzv-endpoint", "h9:2379")
        agents.start("nobody", h2, "--rdzv-endpoint", "10.77.0.99:2379")
        agents.start("loopback", h2, "--rdzv-endpoint", "localhost:2379")
        agents.start("token", h1, "--join-timeout", "60")
        agents.start("token", h2, "--join-timeout", "60", "--token-file", str(tmp_path / "another token"))
        agents.start("no-token", h2, "--rdzv-endpoint", "h2:5000")
        agents.start("even", h2, "--rdzv-endpoint", "h1:5000,h2:5000")
        agents.start("good", h1, "--host-name", "first")
        agents.start("good", h2, "--host-name", "second")

        said = agents.end("hosts", "h1") + agents.end("hosts", "h2")
        assert "--nnodes differs between hosts" in said
        assert "hosts have come (h" in said  # by the host that came first
        assert "refused: h" in said
        said = agents.end("script", "h1") + agents.end("script", "h2")
        assert "the script script.py differs between hosts: it is" in said
        for host in ("h1", "h2"):
            assert "2 ranks (h1 1, h2 1) do not make whole replicas of 3" in agents.end("size", host)
        assert "no way leads from this host to h9:2379: the names have no address" in agents.end("name", "h2")
        assert "no etcd answers at 10.77.0.99:2379 after 5 s" in agents.end("nobody", "h2")
        assert "no other host can" in agents.end("loopback", "h2")
        # Either host may come first, and wait for the other.
        refused, waits = agents.first_to_end("token", "h1", "h2")
        said = agents.end("token", refused)
        assert f"a job of that name runs already, on {waits}" in said
        assert "with another token; give all hosts of a job the same --token-file" in said
        agents.stop("token", waits)
        assert "ended by SIGTERM" in agents.end("token", waits, 128 + signal.SIGTERM)
        said = agents.end("no-token", "h2")
        assert "--token-file is not given, and no process listens at h2:5000" in said
        assert "(umask 077; head -c 32 /dev/urandom | base64 > token)" in said
        assert "give one, or three" in agents.end("even", "h2")
        assert agents.end("good", "h1", 0).count("ran\n") == agents.end("good", "h2", 0).count("ran\n") == 1
        agents.start("running", h2, nnodes="1")
        assert "a job of that name runs already, on h1" in agents.end("running", "h2")
        (tmp_path / "go on").touch()
        assert "waits\n" in agents.end("running", "h1", 0)

        # Raw keys, whichever job has written them.
        keys = _at(h1, lambda: EtcdClient(f"{h1.address}:2379").get_all("")[0])
        assert {found.key for found in keys if "/refused/" not in found.key} == set()
        server.kill()
        server.wait()
        left = LabJob(lab, tmp_path, []).leftovers()
        assert all("recover-etcd" in path for path in left.get("h1", [])), left
        assert "h2" not in left


def _at(host: Host, action: Any) -> Any:
    pidfd = os.pidfd_open(host.init)
    try:
        return namespaces.in_those_of(pidfd, namespaces.NET, action)
    finally:
        os.close(pidfd)
