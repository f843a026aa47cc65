"""A Slurm cluster of real daemons on the hosts of a lab: slurmctld on the last one, slurmd on the others."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from patience import PATIENCE, wait_until
from recover_lab.lab.hosts import Host, Lab

ROOT = Path(__file__).parents[1]
SOCKET = "/tmp/munge.socket"  # every host of a lab has a /tmp of its own; longer paths of sockets are refused
CONF = """
ClusterName=lab
SlurmctldHost={control.name}({control.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket}
CredType=cred/munge
StateSaveLocation={place}/state
SlurmdSpoolDir=/tmp/slurmd
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=60
ReturnToService=2
SchedulerParameters=sched_interval=1
JobRequeue=1
MinJobAge=3600
{nodes}
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """The program that is not installed; None if all are."""
    programs = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
    return next(
        (name for name in programs if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None),
        None,
    )


class SlurmCluster:
    """Commands run in `place`, as in a home that all nodes share. Everything ends with the lab."""

    def __init__(self, lab: Lab, place: Path) -> None:
        *self.nodes, self._control = lab
        self.place, self._files = place, place / "slurm"
        (self._files / "state").mkdir(parents=True)
        (self._files / "munge").mkdir(mode=0o700)
        key = self._files / "munge" / "key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        nodes = "\n".join(
            f"NodeName={node.name} NodeAddr={node.address} CPUs=1 State=UNKNOWN" for node in self.nodes
        )
        conf = CONF.format(control=self._control, socket=SOCKET, place=self._files, nodes=nodes)
        (self._files / "slurm.conf").write_text(conf)
        self._environment = os.environ | {
            "SLURM_CONF": str(self._files / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin",
            "TMPDIR": "/tmp",
            "PYTHONPATH": str(ROOT),
        }

    def start(self) -> None:
        self._start_munge(self._control)
        self._daemon(self._control, "slurmctld", "-D")
        for node in self.nodes:
            self.start_node(node)
        self.wait(lambda: all(self.state(node) == "idle" for node in self.nodes), "nodes are not idle")

    def start_node(self, node: Host) -> None:
        """Start the daemons of a node that has just got its power."""
        self._start_munge(node)
        self._daemon(node, "slurmd", "-D", "-N", node.name)

    def state(self, node: Host) -> str:
        return self.command("sinfo", "-h", "-n", node.name, "-o", "%t").strip()

    def job_state(self, job: str) -> str:
        words = self.command("scontrol", "-o", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith("JobState="))

    def is_free_of_jobs(self) -> bool:
        """Whether the nodes run no process but their daemons."""
        lines = [line for node in self.nodes for line in node.processes().values()]
        return all(line.startswith(("slurmd ", "munged ")) for line in lines)

    def sbatch(self, script: Path, *words: str) -> str:
        """Submit a script. Returns the number of the job."""
        return self.command("sbatch", "--parsable", str(script), *words).strip()

    def command(self, *words: str) -> str:
        with open(self._files / "commands", "a") as errors:
            process = self._control.start(
                list(words),
                env=self._environment,
                cwd=self.place,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            answer, _ = process.communicate(timeout=PATIENCE)
        return str(answer)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        assert wait_until(condition), f"{what}\n{self.picture()}"

    def picture(self) -> str:
        """The ends of all logs."""
        files = [*self._files.glob("*.log"), *self._files.glob("*.out"), *self.place.glob("slurm-*.out")]
        files.append(self._files / "commands")
        return "\n".join(
            f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files if file.exists()
        )

    def _start_munge(self, host: Host) -> None:
        places = {"socket": SOCKET, "pid-file": "/tmp/munge.pid", "log-file": "/tmp/munge.log"}
        places |= {"seed-file": "/tmp/munge.seed", "key-file": str(self._files / "munge" / "key")}
        self._daemon(
            host, "munged", "-F", "--force", *(f"--{name}={value}" for name, value in places.items())
        )

    def _daemon(self, host: Host, *words: str) -> None:
        with open(self._files / f"{words[0]}-{host.name}.out", "ab") as out:
            host.start(list(words), env=self._environment, cwd=self.place, stdout=out, stderr=out)
