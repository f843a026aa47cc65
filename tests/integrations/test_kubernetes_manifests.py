"""The manifests of examples/kubernetes are valid: fields and types by Kubernetes' own schema, names, and commands."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from calm_runs import calm_digest
from kubeflow_trainer_api import models
from left_out import leave_out
from patience import wait_until
from recover_lab.lab.hosts import Lab, unavailable
from training import Trained, small_world

from recover.checkpoint.object_storage import ObjectStorage
from recover.cli import app
from recover.job.config_keys import read_words
from recover.launch.hosts.options import HostOptions, read_options
from recover.train.config import parse

EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"
KINDS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


def documents() -> dict[str, dict[str, Any]]:
    """All manifests by their kind."""
    found = [one for path in sorted(EXAMPLES.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]
    return {one["kind"]: one for one in found}


def unknown_fields(given: Any, read: Any, path: str = "") -> list[str]:
    """The fields that the schema does not know: they are lost when it is read."""
    if isinstance(given, dict) and isinstance(read, dict):
        return [
            name
            for key, value in given.items()
            for name in (
                [f"{path}.{key}"] if key not in read else unknown_fields(value, read[key], f"{path}.{key}")
            )
        ]
    if isinstance(given, list) and isinstance(read, list):
        return [name for a, b in zip(given, read, strict=True) for name in unknown_fields(a, b, path)]
    return []


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_manifest_is_valid_by_the_schema(kind: str) -> None:
    given = documents()[kind]
    read = KINDS[kind].from_dict(given)
    assert read is not None
    assert unknown_fields(given, read.to_dict()) == []


def test_misspelled_field_would_be_noticed() -> None:
    given = documents()["JobSet"]
    job = given["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["backoffLimitPerIndices"] = job.pop("backoffLimitPerIndex")
    read = KINDS["JobSet"].from_dict(given)
    assert read is not None
    assert unknown_fields(given, read.to_dict()) == [
        ".spec.replicatedJobs.template.spec.backoffLimitPerIndices"
    ]


def replicated_jobs() -> list[tuple[str, dict[str, Any], list[str]]]:
    """For JobSet and TrainJob: the name of the JobSet, its one replicated job, and the command."""
    found = documents()
    (one,) = found["JobSet"]["spec"]["replicatedJobs"]
    (container,) = one["template"]["spec"]["template"]["spec"]["containers"]
    (other,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    train_job = found["TrainJob"]
    assert train_job["spec"]["runtimeRef"]["name"] == found["TrainingRuntime"]["metadata"]["name"]
    return [
        (found["JobSet"]["metadata"]["name"], one, container["command"]),
        (train_job["metadata"]["name"], other, train_job["spec"]["trainer"]["command"]),
    ]


@pytest.mark.parametrize("index", [0, 1])
def test_command_of_a_manifest_is_understood_and_names_its_own_pods(index: int) -> None:
    name, job, (program, verb, *words) = replicated_jobs()[index]
    assert program == "recover"
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    given = command.make_context(verb, list(words)).params
    options = HostOptions(
        nnodes=given["nnodes"], rdzv_endpoint=given["rdzv_endpoint"], rdzv_id=given["rdzv_id"]
    )
    part = read_options(options, {})
    pods = [f"{name}-{job['name']}-0-{number}.{name}:2379" for number in range(part.most)]
    assert list(part.endpoints) == pods[:3]
    assert given["returns"]
    assert str(given["token_file"]) == "/run/recover/token"
    keys = [word for word in given["words"] if "=" in word]
    assert parse(read_words(keys)).checkpoint.dir == "s3://my-bucket/first"


@pytest.mark.parametrize("index", [0, 1])
def test_lost_pod_is_replaced_alone(index: int) -> None:
    """Neither JobSet nor Job starts all pods again, and an eviction does not count as a failure of the pod."""
    documents_of = documents()
    sets = [documents_of["JobSet"]["spec"], documents_of["TrainingRuntime"]["spec"]["template"]["spec"]]
    assert sets[index]["failurePolicy"]["maxRestarts"] == 0
    _, job, _ = replicated_jobs()[index]
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["backoffLimitPerIndex"] > 0
    assert "backoffLimit" not in spec
    assert spec["podFailurePolicy"]["rules"][0]["action"] == "Ignore"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


class Kubelet:
    """Runs the container of a manifest on the hosts of a lab, one pod on each, and ends pods as a kubelet does."""

    def __init__(self, lab: Lab, place: Path, index: int) -> None:
        name, job, command = replicated_jobs()[index]
        pods = job["template"]["spec"]["template"]["spec"]
        self.grace = pods["terminationGracePeriodSeconds"]
        self._place = place
        (place / "token").write_text("the token of a job\n")
        # The changes that the guide asks for: numbers, bucket and resources; and the names that a cluster gives.
        changed = {
            "--nproc-per-node=8": "--nproc-per-node=1",
            "--token-file=/run/recover/token": "--token-file=token",
        }
        changed["checkpoint.dir=s3://my-bucket/first"] = f"checkpoint.dir=file://{place}/bucket/first"
        assert changed.keys() <= set(command), command
        self.command = [changed.get(word, word) for word in command]
        for number, host in enumerate(lab, start=0):
            pod = f"{name}-{job['name']}-0-{number}.{name}:"
            self.command = [word.replace(pod, f"{host.name}:") for word in self.command]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = os.environ | {"PATH": path, "PYTHONPATH": str(EXAMPLES.parents[1]), "TMPDIR": "/tmp"}
        self.pods: dict[str, subprocess.Popen[Any]] = {}
        for host in lab:
            where = place / host.name  # the disk of a pod is its own
            where.mkdir()
            for file in ("config.yaml", "token"):
                shutil.copy(place / file, where)
            with open(place / f"{host.name}.out", "wb") as out:
                self.pods[host.name] = host.start(
                    self.command, cwd=where, env=variables, stdout=out, stderr=out, text=True
                )

    def run_dir(self, pod: str) -> Path:
        return self._place / pod / "runs" / "first"

    def delete(self, *pods: str) -> list[int]:
        """SIGTERM to the first process of each container, and SIGKILL after the grace period. Returns exit codes."""
        for pod in pods:
            self.pods[pod].send_signal(signal.SIGTERM)
        until = time.monotonic() + self.grace
        for pod in pods:
            try:
                self.pods[pod].wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.pods[pod].kill()
        return [self.pods[pod].wait() for pod in pods]

    def picture(self) -> str:
        return "\n".join(f"== {pod}\n{(self._place / f'{pod}.out').read_text()}" for pod in self.pods)


@pytest.mark.soak
@pytest.mark.guarantee(
    "Leaving",
    "SIGTERM to a pod of the manifests lets its host leave within the grace period, and no other pod ends.",
)
@pytest.mark.parametrize(
    ("index", "pod"),
    [
        pytest.param(0, "h4", id="JobSet"),
        pytest.param(1, "h1", id="TrainJob, the first pod, with a member of etcd"),
    ],
)
def test_pod_that_gets_sigterm_leaves_and_the_others_go_on(tmp_path: Path, index: int, pod: str) -> None:
    """Runs the command of the manifest with other numbers, names and directories. The job is then stopped by
    deleting all pods at once, as `kubectl delete jobset first` does: it saves, and uploads its last checkpoint."""
    if reason := unavailable():
        leave_out("hosts", reason)
    keys = [
        *small_world(tmp_path / "world"),
        "global_batch=8",
        "pace=0.05",
        "steps=100000",
        "reduction=reproducible",
    ]
    (tmp_path / "config.yaml").write_text(
        "".join(f"{key}: {value}\n" for key, value in (k.split("=") for k in keys))
    )
    others = [name for name in ("h1", "h2", "h3", "h4") if name != pod]
    with Lab(hosts=4, shared=[tmp_path]) as lab:
        kubelet = Kubelet(lab, tmp_path, index)

        def replicas() -> list[int]:
            return [line["replicas"] for line in Trained(0, "", kubelet.run_dir(others[0])).steps]

        assert wait_until(lambda: 4 in replicas()), kubelet.picture()
        assert kubelet.delete(pod) == [0], kubelet.picture()
        seen = len(replicas())
        assert wait_until(lambda: len(replicas()) > seen + 3), kubelet.picture()
        assert all(kubelet.pods[other].poll() is None for other in others), kubelet.picture()
        assert kubelet.delete(*others) == [0, 0, 0], kubelet.picture()
    # A pod may have left before the others were asked: its run directory ends earlier.
    (ended, *_) = (run for other in others if (run := Trained(0, "", kubelet.run_dir(other))).has_summary)
    steps = ended.summary["steps"]
    assert [line["step"] for line in ended.steps] == list(range(1, steps + 1))
    assert {line["microbatches"] for line in ended.steps} == {8}
    uploaded = ObjectStorage(f"file://{tmp_path}/bucket/first").newest()
    assert uploaded is not None
    assert uploaded.step == steps
    assert ended.summary["parameters_digest"] == calm_digest(tmp_path, keys, steps)
