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

from recover.integrations.ray import _Agents, _run_dir
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


@pytest.mark.soak
@pytest.mark.guarantee(
    "Leaving",
    "A node that Ray drains, or whose host is asked to leave, leaves the job, which goes on without it.",
)
@pytest.mark.parametrize("drained", [True, False])
def test_node_of_ray_leaves_and_the_job_goes_on(cluster: RayCluster, drained: bool) -> None:
    """The node leaves by `ray drain-node`, or by `recover leave`."""
    run_dir = cluster.place / "run"
    keys = [*small_world(cluster.place), "accum=2", "reduction=reproducible", "steps=100000", "pace=0.2"]
    example = str(ROOT / "examples" / "ray_train.py")

    def replicas() -> list[int]:
        return [line["replicas"] for line in Trained(0, "", run_dir).steps]

    with open(cluster.place / "job.out", "w") as out:
        command = [sys.executable, example, "3", *keys, "--run-dir", str(run_dir)]
        job = cluster.run(command, stdout=out, stderr=out)
    cluster.wait(lambda: last_step(run_dir) >= 3 or job.poll() is not None, "the job does not start")
    node = cluster.node_id(cluster.lab["h3"])
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "maintenance"]
    drain = ["ray", "drain-node", "--node-id", node, *reason, "--deadline-remaining-seconds", "600"]
    leave = [sys.executable, "-m", "recover.cli", "leave", str(run_dir), "--host", f"ray-{node[:12]}"]
    assert cluster.run(drain if drained else leave).wait(timeout=120) == 0, cluster.picture()
    cluster.wait(lambda: 2 in replicas() or job.poll() is not None, "the node does not leave")
    seen = len(replicas())
    cluster.wait(lambda: len(replicas()) > seen + 3 or job.poll() is not None, "the others do not go on")
    assert job.poll() is None, cluster.picture()
    (run_dir / "stop").touch()
    assert job.wait(timeout=300) == 0, cluster.picture()
    ended = Trained(0, "", run_dir)
    (incident,) = ended.incidents
    assert (incident["kind"], incident["extra_microbatches"]) == ("left", 0)
    assert {line["microbatches"] for line in ended.steps} == {6}
    assert ended.summary["parameters_digest"] == calm_digest(cluster.place, keys, ended.summary["steps"])


def test_driver_goes_on_without_a_node_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent that left has exit code 0, as at the end of the job. No agent is started on its node again, but one on
    the node that takes its place. The job ends with the last agents."""
    nodes, started = {0: "a", 1: "b", 2: "c"}, list[tuple[int, str]]()
    results: dict[str, tuple[int, bool]] = {}
    monkeypatch.setattr(_Agents, "_nodes", lambda agents: dict(nodes))
    monkeypatch.setattr("recover.integrations.ray._LOOK", 0.0)

    def start(index: int) -> str:
        started.append((index, nodes[index]))
        return nodes[index]

    def wait(references: list[str], timeout: float) -> tuple[list[str], list[str]]:
        looks.append(references)
        if len(looks) == 1:
            results["b"] = (0, True)
        if len(looks) == 4:
            assert started == [(0, "a"), (1, "b"), (2, "c")], "nothing is started on the node that has left"
            nodes[1] = "d"
        if len(looks) == 6:
            results.update(dict.fromkeys(("a", "c", "d"), (0, False)))
        return [each for each in references if each in results], []

    looks: list[list[str]] = []
    monkeypatch.setattr("ray.wait", wait)
    monkeypatch.setattr("ray.get", results.__getitem__)
    assert _Agents(None, start).watch() == 0
    assert started[3:] == [(1, "d")]
    assert len(looks) == 6
    assert looks[1] == ["a", "c"]


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["c.yaml", "--run-dir", "/r/x"], "/r/x"),
        (["--run-dir=/r/x", "--resume", "/r/y"], "/r/x"),
        (["--resume", "/r/y", "steps=4"], "/r/y"),
        (["--resume", "s3://b/y"], "runs/j"),
        (["steps=4"], "runs/j"),
    ],
)
def test_run_directory_of_an_agent_is_found_in_its_words(words: list[str], place: str) -> None:
    assert _run_dir(words, ["--nnodes", "3", "--rdzv-id", "j"]) == Path(place)
