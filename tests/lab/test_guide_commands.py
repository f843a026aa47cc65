"""Commands of the guides for etcd and Kubernetes, as they are written there, on emulated hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE, wait_until
from recipes import blocks
from recover_lab.lab.hosts import Host, Lab
from slurm_cluster import ROOT

from recover.world.fabrics.etcd.server import find_binary

GUIDES = ROOT / "docs" / "guides"
QUOTA = 16 << 20  # bytes; that of the guide would take long to fill


class EtcdGuide:
    """The commands of the guide. What differs here: addresses, the directory of the data, and the quota."""

    def __init__(self, lab: Lab, place: Path) -> None:
        self.lab, self.place = lab, place
        self._blocks = blocks("../etcd", "")
        programs = find_binary().parent
        self._environment = os.environ | {
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": "/tmp",
            "ETCDCTL_ENDPOINTS": ",".join(f"http://{host.address}:2379" for host in lab),
        }

    def block(self, words: str) -> str:
        """The block of commands that has these words, with the addresses of the lab."""
        (found,) = (each for each in self._blocks if words in each)
        for number, host in enumerate(self.lab, start=1):
            found = re.sub(rf"\b10\.0\.0\.{number}\b", host.address, found)
        return found

    def start_member(self, host: Host, data: str, *more: str) -> subprocess.Popen[str]:
        """Start a member by the guide's command for h1, with name and addresses of another host."""
        first = self.lab["h1"]
        lines = self.block("--initial-cluster ").splitlines()
        assert lines[0] == "etcd --name h1 --data-dir /var/lib/etcd \\"
        lines[0] = f"exec etcd --name {host.name} --data-dir {self.place / data} \\"
        lines = [
            line if "--initial-cluster " in line else line.replace(first.address, host.address)
            for line in lines
        ]
        command = "\n".join(lines).replace("8589934592", str(QUOTA)) + " " + " ".join(more)
        assert str(QUOTA) in command
        with open(self.place / f"{data}.out", "w") as out:
            return host.start(
                ["bash", "-euc", command], env=self._environment, stdout=out, stderr=out, text=True
            )

    def run_block(self, words: str) -> subprocess.CompletedProcess[str]:
        """Run a block as a reader pastes it: nothing is set before, and each line runs even if the last one failed."""
        return self.run(f"unset ETCDCTL_ENDPOINTS\nset +e\n{self.block(words)}")

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command on h1."""
        process = self.lab["h1"].start(
            ["bash", "-euo", "pipefail", "-c", command],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output, _ = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(command, process.returncode, output)

    def picture(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.place.glob("*.out"))


@pytest.fixture
def guide(a_lab_can_be_made_here: None, tmp_path: Path) -> Iterator[EtcdGuide]:
    with Lab(hosts=3, shared=[tmp_path]) as lab:
        yield EtcdGuide(lab, tmp_path)


def test_commands_of_the_etcd_guide_work_as_written(guide: EtcdGuide) -> None:
    """A cluster is started and examined, a member is lost and replaced; etcd is full, and can be written again.

    In this order: a member that is added after etcd was full repeats the refused writes from the log, and may
    raise the alarm once more.
    """
    members = {host.name: guide.start_member(host, host.name) for host in guide.lab}
    assert wait_until(lambda: guide.run("etcdctl endpoint health").returncode == 0), guide.picture()
    examined = guide.run_block("recover doctor")
    assert (examined.returncode, "Fit: jobs can use this etcd" in examined.stdout) == (0, True), (
        examined.stdout
    )
    assert re.search(r"etcd members +│ ok +│ 3: 1 may be lost", examined.stdout), examined.stdout

    members["h3"].kill()
    members["h3"].wait()
    # etcd refuses until its members have been connected for five seconds.
    assert wait_until(lambda: guide.run_block("member remove").returncode == 0), guide.picture()
    guide.start_member(guide.lab["h3"], "h3-again", "--initial-cluster-state existing")
    assert wait_until(lambda: guide.run("etcdctl endpoint health").returncode == 0), guide.picture()
    listed = guide.run("etcdctl member list").stdout
    assert (listed.count("started"), listed.count("h3")) == (3, 1), listed

    put = "head -c 1000000 /dev/zero | tr '\\0' x | etcdctl put key > /dev/null"
    full = guide.run(f"for i in $(seq 100); do {put}; done")
    assert "database space exceeded" in full.stdout, full.stdout
    assert "NOSPACE" in guide.run_block("recover doctor").stdout

    def freed() -> bool:
        return guide.run_block("alarm disarm").returncode == 0 and guide.run(put).returncode == 0

    assert wait_until(freed), guide.picture()  # again where a member was late, as the guide says


def test_commands_of_the_kubernetes_guide_name_files_and_a_secret_that_serve() -> None:
    """Without kubectl and a cluster: the names in the commands are checked instead, and the guide says that its lines
    were never run."""
    text = (GUIDES / "kubernetes.md").read_text()
    (commands,) = blocks("../kubernetes", "")
    lines = commands.splitlines()
    assert all(line.startswith("kubectl ") for line in lines)
    assert "the lines with `kubectl` were never run" in " ".join(text.split())
    files = [Path(ROOT, line.rpartition(" ")[2]) for line in lines if " apply -f " in line]
    assert files == sorted((ROOT / "examples/kubernetes").glob("*.yaml"))
    (secret,) = re.findall(r"--from-literal=token=\$\((.*)\)", commands)
    made = [subprocess.run(["bash", "-c", secret], capture_output=True, text=True).stdout for _ in range(2)]
    assert len(set(made)) == 2
    assert all(re.fullmatch(r"[A-Za-z0-9+/]{43}=", each) for each in made), made
