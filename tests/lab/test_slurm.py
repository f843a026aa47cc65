"""The examples for Slurm, on real daemons: a node is lost under the job, which goes on, and a node rejoins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from calm_runs import calm_digest
from left_out import leave_out
from recover_lab.lab.hosts import Lab
from slurm_cluster import ROOT, SlurmCluster, missing
from training import Trained, small_world

from recover.checkpoint import directory
from recover.runs.records.job_state import last_step

TRAIN, JOIN = (ROOT / "examples/slurm" / name for name in ("train.sbatch", "join.sbatch"))


@pytest.fixture
def cluster(a_lab_can_be_made_here: None, tmp_path: Path) -> Iterator[SlurmCluster]:
    if program := missing():
        leave_out("slurm", f"there is no {program} here; Debian has it in slurm-wlm and munge")
    with Lab(hosts=4, shared=[tmp_path]) as lab:
        cluster = SlurmCluster(lab, tmp_path)
        cluster.start()
        yield cluster


class SlurmJob:
    """A job of examples/slurm/train.sbatch with a step of about half a second."""

    def __init__(self, cluster: SlurmCluster, *words: str) -> None:
        self.cluster = cluster
        keys = ("steps=100000", "accum=2", "pace=0.2", "reduction=reproducible", *words)
        self.words = [*small_world(cluster.place), *keys]
        self.number = cluster.sbatch(TRAIN, *self.words)
        self.run_dir = cluster.place / "runs" / self.number

    def wait_for_step(self, step: int) -> None:
        self.cluster.wait(lambda: last_step(self.run_dir) >= step, f"step {step} of job {self.number}")

    def wait_for_replicas(self, count: int) -> None:
        seen = len(self.lines())
        self.cluster.wait(
            lambda: any(line["replicas"] == count for line in self.lines()[seen:]), f"{count} replicas"
        )

    def lines(self) -> list[dict[str, object]]:
        return Trained(0, "", self.run_dir).steps

    def stop(self) -> Trained:
        """Stop by the file in the run directory; the job has then succeeded."""
        (self.run_dir / "stop").touch()
        self.cluster.wait(lambda: self.cluster.job_state(self.number) == "COMPLETED", "COMPLETED")
        return Trained(0, "", self.run_dir)


@pytest.mark.guarantee(
    "Several hosts",
    "A Slurm job that loses a node goes on without a requeue, another node joins it, and the parameters are those of "
    "a calm run on one machine.",
)
def test_slurm_job_loses_a_node_goes_on_and_gets_one_back(cluster: SlurmCluster) -> None:
    job = SlurmJob(cluster)
    job.wait_for_step(3)
    lost = cluster.nodes[2]
    lost.power_cut()  # its slurmd, its step and its agent
    job.wait_for_replicas(2)
    cluster.wait(lambda: cluster.state(lost).startswith("down"), "slurmctld does not notice the loss")
    assert cluster.job_state(job.number) == "RUNNING"
    job.wait_for_step(last_step(job.run_dir) + 2)

    lost.power_on()
    cluster.start_node(lost)
    cluster.wait(lambda: cluster.state(lost) == "idle", "the node does not return")
    joined = cluster.sbatch(JOIN, job.number)
    job.wait_for_replicas(3)
    ended = job.stop()
    cluster.wait(lambda: cluster.job_state(joined) == "COMPLETED", "the job that joined")
    assert {line["microbatches"] for line in ended.steps} == {6}
    assert [line["step"] for line in ended.steps] == list(range(1, ended.summary["steps"] + 1))
    calm = calm_digest(cluster.place, job.words, ended.summary["steps"])
    assert ended.summary["parameters_digest"] == calm


@pytest.mark.soak
def test_scancel_ends_a_job_with_a_checkpoint(cluster: SlurmCluster) -> None:
    """Slurm sends SIGTERM to all processes of the job, and SIGKILL after KillWait."""
    job = SlurmJob(cluster)
    job.wait_for_step(3)
    cluster.command("scancel", job.number)
    cluster.wait(lambda: cluster.job_state(job.number) == "CANCELLED", "CANCELLED")
    cluster.wait(lambda: all(cluster.state(node) == "idle" for node in cluster.nodes), "nodes are not free")
    found = directory.latest(job.run_dir)
    assert found is not None, cluster.picture()
    assert found.is_confirmed
    assert found.step == last_step(job.run_dir), cluster.picture()


@pytest.mark.soak
def test_requeued_job_resumes_from_its_last_checkpoint(cluster: SlurmCluster) -> None:
    job = SlurmJob(cluster, "checkpoint.every=2")
    job.wait_for_step(5)
    cluster.command("scontrol", "requeue", job.number)
    cluster.wait(lambda: cluster.job_state(job.number) == "PENDING", "PENDING")
    found = directory.latest(job.run_dir)
    assert found is not None
    # Slurm holds a requeued job back for two minutes, in which the last processes of the job end.
    cluster.wait(cluster.is_free_of_jobs, "processes of the requeued job stay")
    cluster.command("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    cluster.wait(lambda: cluster.job_state(job.number) == "RUNNING", "RUNNING")
    job.wait_for_step(max(found.step, last_step(job.run_dir)) + 3)
    ended = job.stop()
    assert [line["step"] for line in ended.steps] == list(range(1, ended.summary["steps"] + 1))
    calm = calm_digest(cluster.place, job.words, ended.summary["steps"])
    assert ended.summary["parameters_digest"] == calm


@pytest.mark.soak
@pytest.mark.guarantee(
    "Leaving", "A node that Slurm signals leaves the job, which goes on, and its own Slurm job has succeeded."
)
def test_signalled_node_leaves_and_the_job_goes_on(cluster: SlurmCluster) -> None:
    """A node with a Slurm job of its own (join.sbatch), by `scancel --signal=TERM` to all processes of its step."""
    job = SlurmJob(cluster)
    job.wait_for_step(3)
    node = cluster.nodes[2]
    node.power_cut()
    job.wait_for_replicas(2)
    # srun ends the whole step if a node answers again that is not yet down for Slurm.
    cluster.wait(lambda: cluster.state(node).startswith("down"), "slurmctld does not notice the loss")
    node.power_on()
    cluster.start_node(node)
    cluster.wait(lambda: cluster.state(node) == "idle", "the node does not return")
    joined = cluster.sbatch(JOIN, job.number)
    job.wait_for_replicas(3)
    cluster.command("scancel", "--signal=TERM", joined)
    cluster.wait(lambda: cluster.job_state(joined) == "COMPLETED", "the node does not leave")
    job.wait_for_replicas(2)
    job.wait_for_step(last_step(job.run_dir) + 2)
    assert cluster.job_state(job.number) == "RUNNING"
    ended = job.stop()
    left = [line for line in ended.incidents if line.get("left_ranks")]
    assert [line["extra_microbatches"] for line in left] == [0], ended.incidents
    assert {line["microbatches"] for line in ended.steps} == {6}
    calm = calm_digest(cluster.place, job.words, ended.summary["steps"])
    assert ended.summary["parameters_digest"] == calm


@pytest.mark.soak
def test_signal_to_all_nodes_stops_the_job_with_a_checkpoint(cluster: SlurmCluster) -> None:
    """As before the time limit (`--signal=TERM@120`): all hosts are asked to leave, so all stop."""
    job = SlurmJob(cluster)
    job.wait_for_step(3)
    cluster.command("scancel", "--signal=TERM", job.number)
    cluster.wait(lambda: cluster.job_state(job.number) == "COMPLETED", "COMPLETED")
    ended, found = Trained(0, "", job.run_dir), directory.latest(job.run_dir)
    assert found is not None, cluster.picture()
    assert found.is_confirmed
    assert found.step == ended.summary["steps"] == last_step(job.run_dir), cluster.picture()
