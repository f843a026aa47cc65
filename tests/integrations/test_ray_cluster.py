"""A job on a real Ray cluster loses a node, goes on, and gets the node back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from calm_runs import calm_digest
from left_out import leave_out
from ray_cluster import ROOT, RayCluster
from recover_lab.lab.hosts import Lab, unavailable
from training import Trained, small_world

from recover.runs.records.job_state import last_step


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    if reason := unavailable():
        leave_out("hosts", reason)
    with Lab(hosts=3, shared=[tmp_path]) as lab:
        cluster = RayCluster(lab, tmp_path)
        cluster.start()
        yield cluster


@pytest.mark.guarantee(
    "Several hosts",
    "A job on Ray goes on when a node is lost, the agent is started again on a node that comes, and the parameters are "
    "those of a calm run on one machine.",
)
def test_ray_job_loses_a_node_goes_on_and_gets_it_back(cluster: RayCluster) -> None:
    run_dir, lost = cluster.place / "run", cluster.lab["h3"]
    keys = [*small_world(cluster.place), "accum=2", "reduction=reproducible", "steps=100000", "pace=0.2"]
    words = [*keys, "--run-dir", str(run_dir)]
    example = str(ROOT / "examples" / "ray_train.py")

    def replicas() -> list[int]:
        return [line["replicas"] for line in Trained(0, "", run_dir).steps]

    with open(cluster.place / "job.out", "w") as out:
        job = cluster.run([sys.executable, example, "3", *words], stdout=out, stderr=out)
    cluster.wait(lambda: last_step(run_dir) >= 3 or job.poll() is not None, "the job does not start")
    assert job.poll() is None, cluster.picture()
    lost.power_cut()  # its raylet, its worker and its agent
    cluster.wait(lambda: 2 in replicas(), "the loss is not noticed")
    cluster.wait(lambda: lost.address not in cluster.alive(), "Ray does not notice the loss")
    seen = len(replicas())
    lost.power_on()
    cluster.start_node(lost)
    cluster.wait(lambda: 3 in replicas()[seen:], "the node does not come back")
    (run_dir / "stop").touch()
    assert job.wait(timeout=300) == 0, cluster.picture()

    ended = Trained(0, "", run_dir)
    steps = ended.summary["steps"]
    assert [line["step"] for line in ended.steps] == list(range(1, steps + 1))
    assert {line["microbatches"] for line in ended.steps} == {6}
    assert ended.summary["parameters_digest"] == calm_digest(cluster.place, keys, steps)
