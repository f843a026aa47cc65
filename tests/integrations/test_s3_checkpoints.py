"""Checkpoints on a real S3 server: nothing half-written is resumed, and a storage that fails costs no step."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import OWN_STEP, Job
from patience import wait_until
from rank_pids import ranks_of_run
from s3_server import BUCKET, S3Server
from training import Trained, finish, small_world, start

from recover.checkpoint.object_storage import ObjectStorageError
from recover.runs.records.job_state import last_step
from recover.train.preparation import prepare_run


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.close()


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


def stop(job: subprocess.Popen[str], run_dir: Path) -> Trained:
    job.send_signal(signal.SIGTERM)
    return finish(job, run_dir)


@pytest.mark.guarantee(
    "The trainer",
    "While the S3 server is down a run takes its steps; then its newest checkpoint is uploaded, and another machine "
    "resumes from it.",
)
def test_run_outlives_its_s3_server_and_resumes_elsewhere(tmp_path: Path, s3: S3Server) -> None:
    words = [*small_world(tmp_path), "replicas=2", "accum=1", "steps=100000", "checkpoint.every=5"]
    run_dir, url = tmp_path / "run", f"s3://{BUCKET}/outlives"
    with open(tmp_path / "output", "w+") as output:
        job = start(run_dir, *words, f"checkpoint.dir={url}", output=output)
        said = (tmp_path / "output").read_text
        assert wait_until(lambda: s3.complete("outlives") or job.poll() is not None), said()
        s3.gate.is_open = False
        assert wait_until(lambda: "was not uploaded" in said() or job.poll() is not None)
        seen = last_step(run_dir)
        assert wait_until(lambda: last_step(run_dir) > seen + 10 or job.poll() is not None)
        s3.gate.is_open = True
        assert wait_until(lambda: "is uploaded: s3://" in said() or job.poll() is not None)
        ended = stop(job, run_dir)
    assert ended.code == 0, said()
    assert said().count("was not uploaded") == 1  # reported once, however often it was tried
    stopped = ended.summary["steps"]
    assert s3.complete("outlives")[-1] == stopped
    assert len(s3.complete("outlives")) == 2  # checkpoint.keep

    steps = stopped + 3
    again = finish(
        start(tmp_path / "elsewhere", "replicas=1", f"steps={steps}", resume=url), tmp_path / "elsewhere"
    )
    assert again.code == 0, again.output
    assert [line["step"] for line in again.steps] == list(range(steps - 2, steps + 1))
    assert s3.complete("outlives")[-1] == steps
    # The first directory lacks the steps that were taken elsewhere: the newest checkpoint of both places counts.
    here = finish(start(run_dir, f"steps={steps + 1}", resume=run_dir), run_dir)
    assert here.code == 0, here.output
    assert [line["step"] for line in here.steps if line["step"] > stopped] == [steps + 1]


def test_writer_killed_in_the_middle_of_an_upload(tmp_path: Path, s3: S3Server) -> None:
    """First the writer is killed: its successor uploads. Then the whole job: the last complete checkpoint counts."""
    words = [*small_world(tmp_path), "replicas=2", "accum=1", "steps=100000", "checkpoint.every=5"]
    run_dir, url = tmp_path / "run", f"s3://{BUCKET}/killed"
    job = start(run_dir, *words, f"checkpoint.dir={url}", quiet=True)
    assert wait_until(lambda: s3.complete("killed") or job.poll() is not None)
    s3.gate.hold_uploads(after=20_000)
    assert wait_until(s3.gate.stalled.is_set)
    before = s3.complete("killed")
    os.kill(ranks_of_run(run_dir)[0][0], signal.SIGKILL)
    s3.gate.release()
    assert wait_until(lambda: s3.complete("killed")[-1] > before[-1] or job.poll() is not None)
    assert job.poll() is None

    s3.gate.hold_uploads(after=20_000)
    assert wait_until(s3.gate.stalled.is_set)
    complete = s3.complete("killed")
    for pid, _ in ranks_of_run(run_dir).values():
        os.kill(pid, signal.SIGKILL)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    s3.gate.release()
    assert s3.complete("killed") == complete
    steps = complete[-1] + 2
    again = finish(start(tmp_path / "elsewhere", f"steps={steps}", resume=url), tmp_path / "elsewhere")
    assert again.code == 0, again.output
    assert again.steps[0]["step"] == complete[-1] + 1
    # The unfinished upload of the killed job is removed, or is newer than all that was kept.
    unfinished = {name.split("/")[0] for name in s3.names("killed")} - {"owner.json"}
    assert s3.complete("killed")[-1] == steps
    assert all(int(name.split("-")[1]) >= complete[-1] for name in unfinished)


def test_unusable_object_storage_is_refused_before_any_process_starts(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = small_world(tmp_path)

    def refused(url: str) -> str:
        with pytest.raises(ObjectStorageError) as raised:
            prepare_run([*words, f"checkpoint.dir={url}"], tmp_path / "run", [], None)
        assert str(raised.value).startswith(url)
        return str(raised.value)

    prepare_run([*words, f"checkpoint.dir=s3://{BUCKET}/fine"], tmp_path / "run", [], None)
    assert "create the bucket" in refused("s3://no-such-bucket/run")
    with pytest.raises(ObjectStorageError, match="create the bucket"):
        prepare_run(words, tmp_path / "run", [], "s3://no-such-bucket/run")
    with monkeypatch.context() as wrong:
        wrong.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        assert "check the credentials" in refused(f"s3://{BUCKET}/run")
    with monkeypatch.context() as wrong:
        wrong.setenv("AWS_ACCESS_KEY_ID", "AKIANOBODY")
        assert "check the credentials" in refused(f"s3://{BUCKET}/run")
    with monkeypatch.context() as wrong:
        wrong.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        assert "check that the server is reachable" in refused(f"s3://{BUCKET}/run")
    s3.client().put_object(
        Bucket=BUCKET, Key="taken/owner.json", Body=b'{"owner": "a", "host": "h", "at": 0}'
    )
    assert "was taken by another job (of host h" in refused(f"s3://{BUCKET}/taken")
    assert not (tmp_path / "run").exists()


@pytest.mark.guarantee(
    "The trainer",
    "Of two new jobs that are started on one prefix at the same time, one is refused before its ranks start.",
)
@pytest.mark.soak
def test_two_live_jobs_on_one_prefix(tmp_path: Path, s3: S3Server) -> None:
    """Two jobs start at the same time: one gets the prefix. While it runs, no job resumes from there on this machine; a
    job that cannot see it, as on another machine, takes the prefix over, and both go on with all they have."""
    words = [*small_world(tmp_path), "replicas=2", "accum=1", "steps=100000", "checkpoint.every=5"]
    url = f"s3://{BUCKET}/shared"
    places = [tmp_path / name for name in ("one", "two")]
    said = [tmp_path / f"{place.name}.out" for place in places]
    outputs = [path.open("w+") for path in said]
    jobs = [
        start(place, *words, f"checkpoint.dir={url}", output=output)
        for place, output in zip(places, outputs, strict=True)
    ]
    assert wait_until(lambda: any(job.poll() is not None for job in jobs)), [
        path.read_text() for path in said
    ]
    (lost,) = (number for number, job in enumerate(jobs) if job.poll() is not None)
    kept = 1 - lost
    assert jobs[lost].returncode == 2, said[lost].read_text()
    words_of_refusal = (
        "belongs to another job now",
        "a running job uploads there",
        "holds the checkpoints of another",
    )
    assert any(each in said[lost].read_text() for each in words_of_refusal), said[lost].read_text()
    assert not ranks_of_run(places[lost])
    assert wait_until(lambda: s3.complete("shared") or jobs[kept].poll() is not None), said[kept].read_text()

    again = finish(start(tmp_path / "again", resume=url), tmp_path / "again")
    assert (again.code, "a running job uploads there" in again.output) == (2, True), again.output

    owner = json.loads(s3.client().get_object(Bucket=BUCKET, Key="shared/owner.json")["Body"].read())
    del owner["process"]  # as seen from another machine
    s3.client().put_object(Bucket=BUCKET, Key="shared/owner.json", Body=json.dumps(owner).encode())
    over_said = tmp_path / "over.out"
    while True:  # once or twice: it is refused if the older job has uploaded between its look and its claim
        with open(over_said, "a+") as output:
            over = start(tmp_path / "over", resume=url, output=output)
            assert wait_until(
                lambda: last_step(tmp_path / "over") > 0 or over.poll() is not None  # noqa: B023
            ), over_said.read_text()
        if over.poll() is None or "start again" not in over_said.read_text():
            break
        shutil.rmtree(tmp_path / "over")
    assert wait_until(
        lambda: "belongs to another job now" in said[kept].read_text() or jobs[kept].poll() is not None
    )
    ended = [stop(over, tmp_path / "over"), stop(jobs[kept], places[kept])]
    for each in outputs:
        each.close()
    assert [run.code for run in ended] == [0, 0], over_said.read_text() + said[kept].read_text()
    assert "belonged to another job (of host" in over_said.read_text()
    for run in ended:  # the older job has its last checkpoint on disk
        assert f"step-{run.summary['steps']}" in run.checkpoints
    assert s3.complete("shared")[-1] == ended[0].summary["steps"]


SCRIPT = f"""{OWN_STEP}
url = "s3://{BUCKET}/script"
recover.resume(step, url)
while step.index < int(os.environ["STEPS"]):
    for batch in step.microbatches(Data()):
        step.backward(model(batch).sum())
    if step.index % 2 == 0:
        recover.save(step, url)
"""


def test_script_saves_to_a_url_and_resumes_from_it(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another run directory, as on another machine; the last upload is complete when the script has ended."""
    for number, steps in enumerate((4, 6), start=1):
        monkeypatch.setenv("STEPS", str(steps))
        place = tmp_path / str(number)
        place.mkdir()
        job = Job(place, SCRIPT, "-n", "2")
        assert job.finish() == 0, job.stderr
        assert s3.complete("script") == [steps - 2, steps]
        taken = (job.run_dir / "steps.jsonl").read_text().splitlines()
        assert len(taken) == (4, 2)[number - 1]
