"""The manifests of examples/kubernetes are valid: fields and types by Kubernetes' own schema, names, and commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from kubeflow_trainer_api import models

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
    """Of both ways: the name of the JobSet, its one replicated job, and the command."""
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
