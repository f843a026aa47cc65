"""Checkpoints of Lightning and torchtitan in object storage, which both reach by themselves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pl_runs import Lightning
from s3_server import BUCKET, S3Server
from titan_runs import Titan

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    with pytest.MonkeyPatch.context() as variables:
        for name, value in server.environment.items():
            variables.setenv(name, value)
        yield server
    server.close()


@pytest.mark.guarantee(
    "User code",
    "Lightning on ReCoVer saves to URLs and resumes from them, also if a replica died, or it was asked to stop.",
)
def test_lightning_saves_to_a_url_and_resumes_from_it(tmp_path: Path, s3: S3Server) -> None:
    """The first replica, which writes, dies; SIGTERM to the launcher then saves last.ckpt there."""
    lightning, url, steps = Lightning(tmp_path), f"s3://{BUCKET}/lightning", 30
    words = ["--steps", str(steps), "--checkpoints", url]
    first = lightning.stopped("first", 11, words, ["7:0:backward"])
    assert first.code == 128 + signal.SIGTERM, first.output
    last = max(first.losses)
    assert {"step=5.ckpt", "step=10.ckpt", "last.ckpt"} <= set(s3.names("lightning")), first.output
    assert not (tmp_path / "s3:").exists()
    run = lightning.recover("again", 1, [*words, "--resume", f"{url}/last.ckpt"])
    assert run.code == 0, run.output
    assert list(run.losses) == list(range(last + 1, steps + 1))


@pytest.mark.guarantee("User code", "torchtitan on ReCoVer saves to URLs and resumes from them.")
def test_titan_saves_to_a_url_and_resumes_from_it(tmp_path: Path, s3: S3Server) -> None:
    """A replica dies. Another number of replicas resumes."""
    titan = Titan(tmp_path)
    words = ["--checkpoint.folder", f"s3://{BUCKET}/titan"]
    first = titan.recover("first", 2, "llama3", [*words, "--training.steps", "12"], kills=["6:1:in-reduce"])
    assert first.code == 0, first.output
    saved = {name.split("/")[0] for name in s3.names("titan") if name.endswith("/.metadata")}
    assert saved == {"step-10", "step-12"}, first.output
    again = titan.recover("again", 1, "llama3", [*words, "--training.steps", "14"])
    assert again.code == 0, again.output
    assert sorted(again.losses) == [13, 14], again.output
