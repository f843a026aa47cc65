"""Checkpoints in object storage: no run resumes from an interrupted upload, and no failure costs the run anything."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from patience import wait_until
from training import small_world

from recover.checkpoint import directory
from recover.checkpoint.directory import CheckpointError, Found
from recover.checkpoint.object_storage import (
    COMPLETE,
    OWNER,
    ObjectStorage,
    ObjectStorageError,
    UnreachableError,
    Uploader,
    check_url,
    owner_of,
)
from recover.checkpoint.saver import Saver
from recover.checkpoint.tensors import Tensors
from recover.job.config_keys import ConfigError, read
from recover.job.owner import Fate
from recover.job.spec import EtcdAccess, JobSpec
from recover.launch.launcher import held
from recover.train.config import parse
from recover.train.model_shape import shape_of
from recover.train.preparation import prepare_run
from recover.train.streams import open_streams


class Killed(BaseException):
    """Raised where the process is killed."""


class Remote(LocalFileSystem):
    """A storage whose objects are files. `act` is called before and after every change."""

    protocol = "remote"
    act: Callable[[str], object] = staticmethod(lambda what: None)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return (
            LocalFileSystem._strip_protocol(path.removeprefix("remote://")) if isinstance(path, str) else path
        )

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove object by object, in an order of its own: no storage removes several at once."""
        for one in sorted(LocalFileSystem.find(self, path), reverse=True):
            self.rm_file(one)


def _changing(name: str) -> Callable[..., Any]:
    def change(self: Remote, *arguments: Any, **options: Any) -> Any:
        Remote.act(name)
        answer = getattr(LocalFileSystem, name)(self, *arguments, **options)
        Remote.act(f"{name} done")
        return answer

    return change


for operation in ("put_file", "pipe_file", "rm_file", "cat_file", "find"):
    setattr(Remote, operation, _changing(operation))
fsspec.register_implementation("remote", Remote, clobber=True)


@pytest.fixture(autouse=True)
def remote(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], object]], None]:
    monkeypatch.setattr(Remote, "act", staticmethod(lambda what: None))
    return lambda act: monkeypatch.setattr(Remote, "act", staticmethod(act))


def checkpoint(
    run_dir: Path,
    step: int,
    value: float = 0.0,
    saver: Saver | None = None,
    facts: dict[str, Any] | None = None,
) -> Found:
    """A confirmed checkpoint on disk; `value` is its content."""
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, step + value)
    torch.nn.init.zeros_(model.bias)
    saver = saver or Saver(run_dir, 1, 10, 0)
    saver.save(
        step, Tensors(model, torch.optim.SGD(model.parameters(), lr=0.1), 1), {"step": step, **(facts or {})}
    )
    saver.found_equal(step + 1, [0])
    saver.finish()
    return directory.all_good(run_dir)[-1]


def url(tmp_path: Path) -> str:
    return f"remote://{tmp_path}/bucket/run"


def steps(storage: ObjectStorage) -> list[int]:
    return [one.step for one in storage.complete()]


def objects(tmp_path: Path) -> set[str]:
    root = tmp_path / "bucket/run"
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.mark.guarantee(
    "The trainer",
    "A checkpoint in object storage is resumed only if all of its files were uploaded, whenever the writer was killed.",
)
def test_upload_killed_at_any_operation_leaves_the_newest_complete(
    tmp_path: Path, remote: Callable[[Callable[[str], object]], None]
) -> None:
    """The upload is killed before and after every operation on objects: the checkpoint that is found afterwards can be
    loaded, is the new or the old one, and a second upload repairs the rest."""
    first, second = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    killed = 0
    while True:
        place = f"remote://{tmp_path}/bucket-{killed}/run"
        ObjectStorage(place).upload(first, "a", keep=1)
        left = iter(range(killed))

        def die(what: str, left: Any = left) -> None:
            if next(left, None) is None:
                raise Killed

        remote(die)
        try:
            ObjectStorage(place).upload(second, "a", keep=1)
            done = True
        except Killed:
            done = False
        remote(lambda what: None)
        storage = ObjectStorage(place)
        complete = storage.complete()
        assert complete
        for one in complete:  # older ones, too: a user may remove the newest
            found = storage.download(one, tmp_path / f"resumed-{killed}")
            assert found.identity() == {1: first, 2: second}[one.step].identity()
            assert found.path.name == f"step-{one.step}"
        storage.upload(second, "a", keep=1)
        assert steps(storage) == [2]
        assert {path.split("/")[0] for path in objects_of(place)} == {OWNER, f"step-2-{second.digest()}"}
        if done:
            break
        killed += 1
    assert killed > 10  # the operations of one upload


def objects_of(place: str) -> set[str]:
    root = Path(place.removeprefix("remote://"))
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_marker_is_written_after_all_files(
    tmp_path: Path, remote: Callable[[Callable[[str], object]], None]
) -> None:
    one = checkpoint(tmp_path, 1)
    seen: list[set[str]] = []
    remote(lambda what: seen.append(objects(tmp_path)))
    ObjectStorage(url(tmp_path)).upload(one, "a", keep=1)
    name = f"step-1-{one.digest()}"
    files = {f"{name}/{file}" for file in ("part-0.safetensors", "trainer.json")}
    assert all(files <= there for there in seen if f"{name}/{COMPLETE}" in there)
    assert any(files <= there and f"{name}/{COMPLETE}" not in there for there in seen)


def test_retention_keeps_the_newest_and_removes_unfinished_uploads(tmp_path: Path) -> None:
    storage = ObjectStorage(url(tmp_path))
    for step in (1, 2, 3, 4):
        storage.upload(checkpoint(tmp_path, step), "a", keep=2)
    assert steps(storage) == [3, 4]
    half = tmp_path / "bucket/run/step-2-0123456789ab"
    half.mkdir()
    (half / "part-0.safetensors").write_bytes(b"half")
    storage.upload(checkpoint(tmp_path, 5), "a", keep=3)
    assert steps(storage) == [3, 4, 5]
    assert not half.exists() or not list(half.iterdir())
    again = checkpoint(tmp_path / "again", 5, value=0.5)  # the same step, computed again
    storage.upload(again, "a", keep=3)
    assert [one.url.rpartition("-")[2] for one in storage.complete()][-1] == again.digest()
    assert steps(storage) == [3, 4, 5]


@pytest.mark.guarantee(
    "The trainer", "Two jobs that upload to one prefix neither mix nor replace each other's checkpoints."
)
def test_second_job_on_a_prefix_is_refused_and_mixes_nothing(tmp_path: Path) -> None:
    storage = ObjectStorage(url(tmp_path))
    storage.refuse_used()  # accepted: the prefix is new
    mine = checkpoint(tmp_path, 1)
    storage.upload(mine, "a", keep=1)
    with pytest.raises(
        ObjectStorageError, match=r"holds the checkpoints of another run .* newest .* step 1\); give this"
    ):
        storage.refuse_used()
    theirs = checkpoint(tmp_path / "other", 2, value=0.5)
    with pytest.raises(ObjectStorageError, match="belongs to another job now"):
        storage.upload(theirs, "b", keep=1)
    assert objects(tmp_path) == {OWNER} | {
        f"step-1-{mine.digest()}/{file}" for file in ("part-0.safetensors", "trainer.json", COMPLETE)
    }
    storage.claim("b")  # a run that resumes
    storage.upload(theirs, "b", keep=2)
    with pytest.raises(ObjectStorageError, match="belongs to another job now"):
        storage.upload(checkpoint(tmp_path, 3), "a", keep=2)
    assert steps(storage) == [1, 2]


@pytest.mark.guarantee(
    "The trainer",
    "Of two new jobs that are started on one prefix at the same time, one is refused before its ranks start.",
)
def test_two_new_jobs_take_one_prefix_at_the_same_time(
    tmp_path: Path, remote: Callable[[Callable[[str], object]], None]
) -> None:
    """The second job comes at any operation of the first: exactly one of them has the prefix afterwards, and the other
    is refused. The storage of this test cannot create an object atomically, as some storages cannot."""
    happened = 0
    while True:
        place = f"remote://{tmp_path}/bucket-{happened}/run"
        left = iter(range(happened))
        outcomes: dict[str, str] = {}

        def take(job: str, place: str = place, outcomes: dict[str, str] = outcomes) -> None:
            try:
                ObjectStorage(place).take(job, True, tmp_path)
                outcomes[job] = "taken"
            except ObjectStorageError as error:
                outcomes[job] = str(error)

        def interrupt(what: str, left: Any = left, take: Callable[[str], None] = take) -> None:
            if next(left, None) is None:
                remote(lambda what: None)
                take("second")

        remote(interrupt)
        take("first")
        remote(lambda what: None)
        if "second" not in outcomes:
            break
        happened += 1
        owner = ObjectStorage(place).owner()
        assert owner is not None
        loser = {"first": "second", "second": "first"}[owner["owner"]]
        assert outcomes[owner["owner"]] == "taken", outcomes
        told = outcomes[loser]
        assert "belongs to another job now" in told or "a running job uploads there" in told, outcomes
    assert happened > 4


def test_ranks_of_a_job_that_lost_its_prefix_report_it_and_leave_it(tmp_path: Path) -> None:
    """Where a storage cannot create an object atomically, the job that wrote last has the prefix."""
    storage = ObjectStorage(url(tmp_path))
    storage.take("first", True, tmp_path)
    storage.claim("second")
    reports: list[str] = []
    Uploader(url(tmp_path), "first", 1, reports.append).check_owner()
    (told,) = reports
    assert "checkpoints may not be uploaded" in told
    assert "belongs to another job now" in told
    storage.require_owner("second")


@pytest.mark.parametrize("fate", [Fate.ALIVE, Fate.GONE, Fate.RESTARTED, Fate.UNKNOWN])
@pytest.mark.parametrize("has_uploaded", [True, False])
def test_prefix_of_another_job_is_taken_only_if_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: Fate, has_uploaded: bool
) -> None:
    """A new run takes the prefix if that job has ended without a checkpoint. A run that resumes takes it unless that
    job still runs here; where this cannot be known, the job is named."""
    storage = ObjectStorage(url(tmp_path))
    assert storage.take("a", True, tmp_path) == ""
    assert storage.take("a", True, tmp_path) == "", "another host of the same job"
    if has_uploaded:
        storage.upload(checkpoint(tmp_path, 1), "a", keep=1)
    monkeypatch.setattr("recover.checkpoint.object_storage.fate", lambda process, run_dir: fate)
    words = {
        Fate.ALIVE: r"a running job uploads there .*; wait until it ends, stop it",
        Fate.UNKNOWN: "which has uploaded no checkpoint yet; give .* or remove owner.json there",
    }
    refused = "holds the checkpoints of another run" if has_uploaded else words.get(fate)
    if refused:
        with pytest.raises(ObjectStorageError, match=refused):
            storage.take("b", True, tmp_path)
    else:
        assert storage.take("b", True, tmp_path) == ""
    if fate is Fate.ALIVE:
        with pytest.raises(ObjectStorageError, match=words[fate]):
            storage.take("c", False, tmp_path)
        storage.require_owner("a")
    else:
        assert bool(storage.take("c", False, tmp_path)) is (fate is Fate.UNKNOWN)
        with pytest.raises(ObjectStorageError, match="belongs to another job now"):
            storage.require_owner("a")


@pytest.mark.parametrize("same_path", [True, False])
def test_run_resumes_its_prefix_in_another_container_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_path: bool
) -> None:
    """The run holds the lock of its own run directory, as the earlier job did: that lock does not prove a living
    owner. The lock of another directory does."""
    storage, run_dir, other = ObjectStorage(url(tmp_path)), tmp_path / "run", tmp_path / "other"
    run_dir.mkdir()
    other.mkdir()
    monkeypatch.setattr("recover.job.owner._namespace", lambda: 1)
    storage.take("a", True, run_dir)
    monkeypatch.setattr("recover.job.owner._namespace", lambda: 2)
    with held(lock := os.open(run_dir, os.O_RDONLY)):
        fcntl.flock(lock, fcntl.LOCK_EX)
        if same_path:
            with pytest.raises(ObjectStorageError, match=r"or remove owner.json there if that job has ended"):
                storage.take("b", True, run_dir)
            assert storage.take("b", False, run_dir), "whose owner it was is told"
            storage.require_owner("b")
        else:
            for is_new in (True, False):
                with pytest.raises(ObjectStorageError, match="a running job uploads there"):
                    storage.take("b", is_new, other)


def test_takeover_during_an_upload_leaves_it_without_a_marker(
    tmp_path: Path, remote: Callable[[Callable[[str], object]], None]
) -> None:
    storage = ObjectStorage(url(tmp_path))
    storage.claim("a")

    def take_over(what: str) -> None:
        if what == "put_file done":
            (tmp_path / "bucket/run" / OWNER).write_text(json.dumps({"owner": "b", "host": "other", "at": 0}))

    remote(take_over)
    with pytest.raises(ObjectStorageError, match=r"belongs to another job now .*host other"):
        storage.upload(checkpoint(tmp_path, 1), "a", keep=1)
    assert steps(storage) == []


def test_checkpoint_replaced_during_its_upload_gets_no_marker(
    tmp_path: Path, remote: Callable[[Callable[[str], object]], None]
) -> None:
    """A script may save twice after one step: files of both versions must not become one checkpoint."""
    one = checkpoint(tmp_path, 1)
    facts = json.loads((one.path / "trainer.json").read_text())

    def replace(what: str) -> None:
        if what == "put_file done":
            (one.path / "trainer.json").write_text(json.dumps(facts | {"fingerprint": "other"}))

    remote(replace)
    storage = ObjectStorage(url(tmp_path))
    with pytest.raises(CheckpointError, match="was replaced meanwhile"):
        storage.upload(one, "a", keep=1)
    assert steps(storage) == []


def test_damaged_object_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    storage = ObjectStorage(url(tmp_path))
    storage.upload(checkpoint(tmp_path, 1), "a", keep=1)
    newest = storage.newest()
    assert newest is not None
    part = Path(newest.path, "part-0.safetensors")
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match=rf"{newest.url} is damaged .*; remove .*/complete"):
        storage.download(newest, tmp_path / "new")
    assert list((tmp_path / "new/checkpoints").iterdir()) == []


@pytest.mark.guarantee(
    "The trainer",
    "A failed upload is reported, costs the run nothing, and is repeated when the storage answers again.",
)
def test_uploader_goes_on_when_the_storage_answers_again(
    tmp_path: Path, remote: Callable[[Callable[[str], object]], None]
) -> None:
    """The storage fails until a newer checkpoint waits: the newer one is uploaded, and both changes are reported
    once."""
    reports: list[str] = []
    uploader = Uploader(url(tmp_path), "a", 1, reports.append, pause=0.01)
    failures = 0
    down = True

    def fail(what: str) -> None:
        nonlocal failures
        if down:
            failures += 1
            raise ConnectionError("connection refused")

    remote(fail)
    uploader.offer(checkpoint(tmp_path, 1))
    assert wait_until(lambda: failures > 3)
    newer = checkpoint(tmp_path, 2)
    uploader.offer(newer)
    assert uploader.holds(newer)
    assert wait_until(lambda: failures > 6)
    down = False
    assert uploader.finish()
    assert not uploader.holds(newer)
    assert steps(ObjectStorage(url(tmp_path))) == [2]
    assert len(reports) == 2
    assert "the checkpoint of step 1 was not uploaded" in reports[0]
    assert "ConnectionError: connection refused" in reports[0]
    assert "the run goes on" in reports[0]
    assert "the checkpoint of step 2 is uploaded" in reports[1]


def test_uploader_gives_up_at_the_end_and_names_the_local_checkpoint(
    tmp_path: Path, remote: Callable[[Callable[[str], object]], None]
) -> None:
    reports: list[str] = []

    def fail(what: str) -> None:
        raise ConnectionError("connection refused")

    remote(fail)
    uploader = Uploader(url(tmp_path), "a", 1, reports.append, pause=0.01)
    one = checkpoint(tmp_path, 1)
    uploader.offer(one)
    assert not uploader.finish(patience=0)
    assert f"is not uploaded to {url(tmp_path)}: it is in {one.path}" in reports[-1]


def test_wrong_credentials_are_reported_with_each_checkpoint_and_not_waited_for(
    tmp_path: Path, remote: Callable[[Callable[[str], object]], None]
) -> None:
    reports: list[str] = []

    def fail(what: str) -> None:
        raise PermissionError("InvalidAccessKeyId")

    remote(fail)
    uploader = Uploader(url(tmp_path), "a", 1, reports.append)
    for step in (1, 2):
        uploader.offer(checkpoint(tmp_path, step))
        assert wait_until(lambda count=step: len(reports) == count)
        assert "InvalidAccessKeyId; check the credentials" in reports[-1]
    assert uploader.finish()


def test_only_the_first_replica_uploads_and_its_successor_goes_on(tmp_path: Path) -> None:
    """Two hosts with directories of their own both save. The first one is lost before it has uploaded."""
    offered: dict[int, list[int]] = {0: [], 1: []}

    class Offered(Uploader):
        def __init__(self, replica: int) -> None:
            super().__init__(url(tmp_path), "a", 1)
            self._replica = replica

        def offer(self, checkpoint: Found) -> None:
            offered[self._replica].append(checkpoint.step)

    savers = [Saver(tmp_path / str(replica), 1, 1, replica, uploader=Offered(replica)) for replica in (0, 1)]
    model = torch.nn.Linear(1, 1)
    tensors = Tensors(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    for step in (1, 2):
        for saver in savers:
            saver.save(step, tensors, {"step": step})
            saver.found_equal(step + 1, [0, 1])
            saver.finish()
    assert offered == {0: [1, 2], 1: []}
    savers[1].found_equal(4, [1])
    savers[1].finish()
    assert offered[1] == [2]


def test_checkpoint_that_is_being_uploaded_stays_on_disk(tmp_path: Path) -> None:
    class Slow(Uploader):
        held: Found | None = None

        def offer(self, checkpoint: Found) -> None:
            self.held = self.held or checkpoint

        def holds(self, checkpoint: Found) -> bool:
            return checkpoint == self.held

    uploader = Slow(url(tmp_path), "a", 1)
    saver = Saver(tmp_path, 1, 1, 0, uploader=uploader)
    for step in (1, 2, 3):
        checkpoint(tmp_path, step, saver=saver)
    assert [one.step for one in directory.all_good(tmp_path)] == [1, 3]
    uploader.held = None
    checkpoint(tmp_path, 4, saver=saver)
    assert [one.step for one in directory.all_good(tmp_path)] == [4]


def test_errors_name_url_cause_and_remedy(
    tmp_path: Path, remote: Callable[[Callable[[str], object]], None]
) -> None:
    for error, remedy in (
        (PermissionError("AccessDenied"), "check the credentials"),
        (FileNotFoundError("NoSuchBucket"), "create the bucket"),
        (TimeoutError("no answer"), "check that the server is reachable"),
    ):

        def fail(what: str, error: Exception = error) -> None:
            raise error

        remote(fail)
        with pytest.raises(ObjectStorageError, match=f"{error}; {remedy}") as raised:
            ObjectStorage(url(tmp_path)).check()
        assert str(raised.value).startswith(url(tmp_path))
        assert isinstance(raised.value, UnreachableError) == isinstance(error, TimeoutError)
    with pytest.raises(ObjectStorageError, match="fsspec knows"):
        ObjectStorage("nonsense://bucket/run")


@pytest.mark.parametrize("by_url", [True, False])
def test_dry_run_downloads_no_checkpoint(tmp_path: Path, by_url: bool) -> None:
    """Tested with the URL, and with a run directory whose URL has a newer checkpoint. A real start downloads it."""
    words = [*small_world(tmp_path / "world"), "replicas=2", "accum=1", f"checkpoint.dir={url(tmp_path)}"]
    config = parse(read(words))
    shape = asdict(shape_of(config, open_streams(config)[0].vocab))
    run_dir, facts = tmp_path / "run", {"config": config.model_dump(), "model": shape}
    for step in (1, 2):
        saved = checkpoint(tmp_path / "first", step, facts=facts)
        ObjectStorage(url(tmp_path)).upload(saved, "a", keep=2)
        if step == 1 and not by_url:
            shutil.copytree(saved.path, run_dir / "checkpoints" / "step-1")
    before = sorted(run_dir.rglob("*"))
    source = url(tmp_path) if by_url else run_dir
    asked = prepare_run([], run_dir if by_url else None, [], source, elsewhere=True)
    assert asked.resume is not None
    assert (asked.resume.step, asked.resume.identity()) == (2, saved.identity())
    assert sorted(run_dir.rglob("*")) == before
    with pytest.raises(ConfigError, match=r"^remote://.*/step-2-.* was written with seq_len=32"):
        prepare_run(["seq_len=16"], run_dir if by_url else None, [], source, elsewhere=True)
    real = prepare_run([], run_dir if by_url else None, [], source)
    assert real.resume is not None
    assert real.resume.path == run_dir / "checkpoints" / "step-2"
    assert real.resume.path.exists()


@pytest.mark.parametrize("place", ["s3://", "s3:///", "memory://x"])
def test_url_without_a_lasting_place_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match=f"checkpoint.dir={place} is"):
        check_url("checkpoint.dir", place)


def test_checkpoint_dir_must_be_a_url() -> None:
    assert parse({"checkpoint.dir": "s3://bucket/run"}).checkpoint.dir == "s3://bucket/run"
    with pytest.raises(ConfigError, match=r"checkpoint.dir=/mnt/runs is not a URL.*--run-dir"):
        parse({"checkpoint.dir": "/mnt/runs"})


def test_owner_is_the_same_on_all_ranks_and_differs_after_a_restart() -> None:
    def job(token: str, run: str | None = None, host: str = "a") -> JobSpec:
        etcd = EtcdAccess(("127.0.0.1:1",), f"/recover/job/{run}/", token) if run else None
        return JobSpec(2, token=token, etcd=etcd, host=host, run_dir=f"/runs/{host}")

    assert owner_of(job("x", "1", "a")) == owner_of(job("x", "1", "b"))
    owners = {owner_of(one) for one in (job("x"), job("y"), job("x", "1"), job("x", "2"))}
    assert len(owners) == 4
    assert not any("x" * 4 in owner for owner in owners)
