"""Checkpoints in object storage: `s3://BUCKET/PREFIX` and any other URL of fsspec.

    URL/owner.json               the job that uploads there, written before its ranks start; a job that resumes
                                 replaces it
    URL/step-N-DIGEST/           the files of `checkpoints/step-N`; DIGEST follows from their contents
    URL/step-N-DIGEST/complete   the marker, written last: no checkpoint without it is resumed

Object stores have no rename, and two jobs may use one prefix by mistake. Names that follow from the
contents keep files of different checkpoints apart, and make a repeated upload harmless.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recover.checkpoint.directory import FACTS, CheckpointError, Found
from recover.job.optional_packages import MissingExtra
from recover.job.owner import Fate, describe_this_process, fate
from recover.job.record_files import FILES, PATIENCE
from recover.job.spec import JobSpec
from recover.world import rank_exit

COMPLETE = "complete"
OWNER = "owner.json"
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds between two attempts
_NAME = re.compile(r"step-(\d+)-([0-9a-f]{12})")
_EXTRA = "pip install 'recover-train[object-storage]'"
# Packages of a protocol raise errors of their own before a request is sent; waiting does not help.
_LASTING = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError")


class ObjectStorageError(ValueError):
    """The object storage cannot be used. The message names the URL, the cause and the remedy."""

    is_lasting = True


class UnreachableError(ObjectStorageError):
    """The storage cannot be reached now. The same operation may succeed later."""

    is_lasting = False


class RemovalError(ObjectStorageError):
    """The checkpoint is uploaded, and older ones could not be removed; the next upload tries it again."""


def is_url(place: str | Path | None) -> bool:
    return isinstance(place, str) and "://" in place


def check_url(key: str, place: str | None) -> None:
    """Raises ValueError for a place that is not a URL, or whose contents end with the process."""
    if place is None:
        return
    protocol, _, rest = place.partition("://")
    if not is_url(place) or not rest.strip("/"):
        raise ValueError(
            f"{key}={place} is not a URL with a place in it; give one such as s3://BUCKET/PREFIX or file:///DIRECTORY, "
            "or choose a local directory by --run-dir"
        )
    if protocol == "memory":
        raise ValueError(
            f"{key}={place} is the memory of one process, and ends with it; give s3://BUCKET/PREFIX"
        )


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint in object storage."""

    url: str
    path: str  # in the file system of fsspec
    step: int


@dataclass(frozen=True)
class RemoteCheckpoint(Found):
    """A checkpoint whose files stay in object storage: only its facts were read. `path` is where it would be
    downloaded to."""

    url: str
    text: str

    @property
    def place(self) -> str:
        return self.url

    def read_facts(self) -> str:
        return self.text

    def mend(self) -> str:
        return _mend(self.url)


def owner_of(job: JobSpec) -> str:
    """An id of the job: the same on all of its ranks, another one after a restart."""
    text = f"{job.token}{job.etcd.prefix if job.etcd else ''}" or f"{socket.gethostname()}:{job.run_dir}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class ObjectStorage:
    """Checkpoints under one URL. Every method raises ObjectStorageError if the storage cannot be used."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            from fsspec.asyn import AsyncFileSystem
            from fsspec.core import url_to_fs
        except ImportError:
            raise MissingExtra(f"{url} needs the package fsspec, which is not installed; {_EXTRA}") from None
        with self._errors():
            # An instance of its own: another thread or a forked process must not share its connections.
            self._fs, root = url_to_fs(self.url, skip_instance_cache=True)
        self._root = root.rstrip("/")
        self._has_directories = not isinstance(self._fs, AsyncFileSystem)

    def check(self) -> None:
        """Write, read and remove a small object."""
        probe = f"{self._root}/.write-test-{time.time_ns()}"
        with self._errors():
            self._write(probe, b"recover")
            self._fs.cat_file(probe)
            self._fs.rm_file(probe)

    def refuse_used(self, job: str = "", run_dir: Path | None = None) -> None:
        """Raises ObjectStorageError if another run than `job` has uploaded to this prefix, or is about to. `run_dir`:
        the directory that this process has locked for `job`."""
        found, owner = self.complete(), self.owner()
        if found:
            raise ObjectStorageError(
                f"{self.url} holds the checkpoints of another run ({_described(owner)}, its newest checkpoint is of "
                f"step {found[-1].step}); give this run a prefix of its own (checkpoint.dir=), or go on with that one "
                f"by --resume {self.url}"
            )
        if owner is None or owner.get("owner") == job:
            return
        self._refuse_living(owner, run_dir)
        if _fate(owner, run_dir) is Fate.UNKNOWN:
            raise ObjectStorageError(
                f"{self.url} was taken by another job ({_described(owner)}), which has uploaded no checkpoint yet; "
                "give this run a prefix of its own (checkpoint.dir=), or remove owner.json there if that job has ended"
            )

    def take(self, owner: str, is_new: bool, run_dir: Path) -> str:
        """Make the job that this process is about to start the owner. Returns the owner before it, in words, if it may
        still run; otherwise "". Raises ObjectStorageError if that job still runs on this machine, or, for a new run,
        if the prefix is used.

        Two new jobs may come at the same time: the storage lets one of them create the object, or at least both see
        which one was last. A job that loses the prefix later stops uploading (`require_owner`).
        """
        found = self.owner()
        if found is not None and found.get("owner") == owner:  # another host of the same job was first
            return ""
        if is_new:
            self.refuse_used(owner, run_dir)
        elif found is not None:
            self._refuse_living(found, run_dir)
        facts = {"run_dir": str(run_dir), "process": describe_this_process()}
        try:
            self.claim(owner, facts, is_first=found is None)
        except FileExistsError:
            pass  # another job was faster: it is named below
        self.require_owner(owner)
        may_run = found is not None and _fate(found, run_dir) is Fate.UNKNOWN
        return _described(found) if may_run else ""

    def _refuse_living(self, owner: dict[str, Any], run_dir: Path | None) -> None:
        if _fate(owner, run_dir) is Fate.ALIVE:
            raise ObjectStorageError(
                f"{self.url}: a running job uploads there ({_described(owner)}, pid {owner['process']['pid']}, in "
                f"{owner['run_dir']}); wait until it ends, stop it (SIGTERM to its launcher: it saves first), or give "
                "this run a prefix of its own (checkpoint.dir=)"
            )

    def newest(self) -> StoredCheckpoint | None:
        """The newest complete checkpoint."""
        if found := self.complete():
            return found[-1]
        self.check()  # a missing bucket is listed as an empty one
        return None

    def complete(self) -> list[StoredCheckpoint]:
        """Complete checkpoints, oldest first."""
        found = []
        for name, files in self._names().items():
            if COMPLETE in files and (match := _NAME.fullmatch(name)):
                url, path = f"{self.url}/{name}", f"{self._root}/{name}"
                found.append(StoredCheckpoint(url, path, int(match[1])))
        return sorted(found, key=lambda one: (one.step, one.url))

    def upload(self, local: Found, owner: str, keep: int) -> str:
        """Upload a confirmed checkpoint, then remove all but the last `keep`. Returns its URL."""
        digest = local.digest()
        name = f"step-{local.step}-{digest}"
        target, files = f"{self._root}/{name}", list(local.facts()["files"])
        if COMPLETE not in self._names().get(name, ()):
            self.require_owner(owner)
            with self._errors():
                self._make_directory(target)
                for file in (*files, FACTS):
                    if not (local.path / file).exists():
                        raise CheckpointError(f"{local.path / file} was removed meanwhile")
                    self._fs.put_file(str(local.path / file), f"{target}/{file}")
            # Uploading may take minutes, in which another job can take over, or a script save again.
            self.require_owner(owner)
            if local.digest() != digest:
                raise CheckpointError(f"{local.path} was replaced meanwhile")
            with self._errors():
                self._write(f"{target}/{COMPLETE}", json.dumps({"owner": owner, "at": time.time()}).encode())
        try:
            self._remove_old(name, local.step, keep)
        except ObjectStorageError as error:
            raise RemovalError(
                f"{self.url}/{name} is uploaded, but older ones were not removed: {error}"
            ) from None
        return f"{self.url}/{name}"

    def look_at(self, stored: StoredCheckpoint, run_dir: Path) -> RemoteCheckpoint:
        """Read the facts of a checkpoint that could be downloaded to `run_dir`."""
        with self._errors():
            text = self._fs.cat_file(f"{stored.path}/{FACTS}").decode(errors="replace")
        path = run_dir / "checkpoints" / f"step-{stored.step}"
        return RemoteCheckpoint(path, stored.step, stored.url, text)

    def download(self, stored: StoredCheckpoint, run_dir: Path) -> Found:
        """Download to `run_dir`/checkpoints/step-N, which exists only with all of its files."""
        directory = run_dir / "checkpoints"
        draft = directory / f".fetch-{time.time_ns()}"
        draft.mkdir(parents=True)
        found = Found(draft, stored.step)
        try:
            try:
                with self._errors():
                    self._fs.get_file(f"{stored.path}/{FACTS}", str(draft / FACTS))
                    for file in found.facts()["files"]:
                        if Path(file).name == file:  # `verify` refuses others
                            self._fs.get_file(f"{stored.path}/{file}", str(draft / file))
                found.verify()
            except CheckpointError as error:
                raise CheckpointError(f"{stored.url} is damaged ({error}); {_mend(stored.url)}") from None
            place = Found(directory / f"step-{stored.step}", stored.step)
            try:
                draft.rename(place.path)
            except OSError:
                # It exists already: another process of this host was faster, or an earlier job has saved it.
                if place.identity() != found.identity():
                    raise CheckpointError(
                        f"{place.path} differs from {stored.url}: another run saved it; give another --run-dir, or "
                        "move it away"
                    ) from None
            return place
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def owner(self) -> dict[str, Any] | None:
        """The job that uploads here; None if no job has."""
        with self._errors():
            self._fs.invalidate_cache()
            try:
                owner = json.loads(self._fs.cat_file(f"{self._root}/{OWNER}"))
            except FileNotFoundError:
                return None
            except ValueError:
                return {}  # written at this moment
        return owner if isinstance(owner, dict) else {}

    def claim(self, owner: str, more: Mapping[str, Any] | None = None, is_first: bool = False) -> None:
        """Make this job the owner. An earlier owner stops uploading. `is_first`: raises FileExistsError if there is
        one, where the storage can tell."""
        facts = {"owner": owner, "host": socket.gethostname(), "at": time.time(), **(more or {})}
        with self._errors(FileExistsError):
            self._write(
                f"{self._root}/{OWNER}", json.dumps(facts).encode(), "create" if is_first else "overwrite"
            )

    def require_owner(self, owner: str) -> None:
        """Claim a prefix without an owner. Raises ObjectStorageError if another job owns it."""
        found = self.owner()
        if found is None:
            self.claim(owner)
        elif found.get("owner") != owner:
            raise ObjectStorageError(
                f"{self.url} belongs to another job now ({_described(found)}); give one of the two jobs a prefix of "
                "its own"
            )

    def _remove_old(self, kept: str, step: int, keep: int) -> None:
        """Remove older checkpoints, other versions of this step, and files of uploads that never ended."""
        names = self._names()
        found = {name: int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
        whole = [name for name in sorted(found, key=lambda name: found[name]) if COMPLETE in names[name]]
        older = [name for name in whole if found[name] < step]
        gone = older[: len(older) - keep + 1]
        gone += [name for name in found if found[name] == step and name != kept]
        gone += [name for name in found if found[name] < step and name not in whole]
        with self._errors():
            for name in gone:
                if COMPLETE in names[name]:  # first: half a checkpoint must not have the marker
                    self._fs.rm_file(f"{self._root}/{name}/{COMPLETE}")
                self._fs.rm(f"{self._root}/{name}", recursive=True)

    def _names(self) -> dict[str, set[str]]:
        """The names of checkpoints, complete or not, with the names of their files."""
        found: dict[str, set[str]] = {}
        with self._errors():
            self._fs.invalidate_cache()
            for path in self._fs.find(self._root):
                name, _, file = path[len(self._root) :].lstrip("/").rpartition("/")
                found.setdefault(name, set()).add(file)
        return found

    def _write(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        self._make_directory(path.rpartition("/")[0])
        self._fs.pipe_file(path, data, mode=mode)

    def _make_directory(self, path: str) -> None:
        # Object stores need no directories, and s3fs would create a bucket that does not exist.
        if self._has_directories:
            self._fs.makedirs(path, exist_ok=True)

    @contextmanager
    def _errors(self, *known: type[Exception]) -> Iterator[None]:
        """Translate the errors of fsspec and of the package for the protocol, except those that the caller
        handles (`known`)."""
        try:
            yield
        except (ObjectStorageError, CheckpointError):
            raise
        except ImportError as error:
            raise MissingExtra(
                f"{self.url} needs a package that is not installed ({error}); {_EXTRA}"
            ) from None
        except Exception as error:
            if isinstance(error, known):
                raise
            cause = f"{self.url}: {type(error).__name__}: {error}"
            if isinstance(error, PermissionError) or type(error).__name__ in _LASTING:
                remedy = "check the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the role)"
            elif isinstance(error, FileNotFoundError):
                remedy = "create the bucket, or correct the URL"
            elif isinstance(error, ValueError):
                remedy = "give a URL that fsspec knows, such as s3://BUCKET/PREFIX"
            else:
                remedy = (
                    "check that the server is reachable (AWS_ENDPOINT_URL selects another one than Amazon's)"
                )
                raise UnreachableError(f"{cause}; {remedy}") from None
            raise ObjectStorageError(f"{cause}; {remedy}") from None


class Uploader:
    """Uploads checkpoints of one rank in a thread: the newest one that was offered.

    A failure is reported and costs the run nothing: the checkpoint stays on the local disk, and is
    uploaded when the storage answers again, unless a newer one has taken its place.
    """

    def __init__(
        self,
        url: str,
        owner: str,
        keep: int,
        report: Callable[[str], object] = rank_exit.report,
        pause: float = FIRST_PAUSE,
    ) -> None:
        self.url, self._owner, self._keep = url, owner, keep
        self._report, self._pause = report, pause
        self._changed = threading.Condition()
        self._next: Found | None = None  # waits for the thread
        self._now: Found | None = None  # is being uploaded
        self._ends = False
        self._storage: ObjectStorage | None = None
        self._thread: threading.Thread | None = None

    def check_owner(self) -> None:
        """Report if another job has taken the prefix since this one was started."""
        try:
            self._opened().require_owner(self._owner)
        except ValueError as error:
            self._report(f"checkpoints may not be uploaded: {error}")

    def offer(self, checkpoint: Found) -> None:
        """Upload this checkpoint, instead of an older one that still waits."""
        with self._changed:
            self._next = checkpoint
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="recover-uploader", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def holds(self, checkpoint: Found) -> bool:
        """Whether its files are still needed."""
        with self._changed:
            return checkpoint in (self._next, self._now)

    def finish(self, patience: float = PATIENCE) -> bool:
        """Wait until everything is uploaded. Returns whether it is; gives up after `patience` seconds."""
        until = time.monotonic() + patience
        while (left := self._waiting()) and time.monotonic() < until:
            FILES.pause()
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        if left:
            self._report(
                f"the checkpoint of step {left.step} is not uploaded to {self.url}: it is in {left.path}"
            )
        return left is None

    def _waiting(self) -> Found | None:
        with self._changed:
            return self._next or self._now

    def _work(self) -> None:
        failed, pause = False, self._pause
        while True:
            with self._changed:
                while self._next is None and self._now is None and not self._ends:
                    self._changed.wait()
                if self._ends:
                    return
                self._now, self._next = self._next or self._now, None
                checkpoint = self._now
            assert checkpoint is not None
            try:
                url = self._opened().upload(checkpoint, self._owner, self._keep)
            except RemovalError as error:
                self._report(str(error))
                url = str(error).partition(" ")[0]
            except Exception as error:
                is_lasting = getattr(error, "is_lasting", True)
                if not failed or is_lasting:
                    again = "with the next checkpoint" if is_lasting else "until it succeeds"
                    self._report(
                        f"the checkpoint of step {checkpoint.step} was not uploaded ({error}); it stays in "
                        f"{checkpoint.path}, the run goes on, and tries again {again}"
                    )
                failed = True
                with self._changed:
                    if is_lasting:
                        self._now = None
                    else:
                        self._changed.wait_for(lambda: self._next or self._ends, pause)
                        pause = min(2 * pause, LONGEST_PAUSE)
                continue
            with self._changed:
                self._now = None
            if failed:
                self._report(f"the checkpoint of step {checkpoint.step} is uploaded: {url}")
            else:
                rank_exit.log(f"uploaded {url}")
            failed, pause = False, self._pause

    def _opened(self) -> ObjectStorage:
        if self._storage is None:
            self._storage = ObjectStorage(self.url)
        return self._storage


def _mend(url: str) -> str:
    return f"remove {url}/{COMPLETE}, and the one before it is taken"


def _fate(owner: dict[str, Any], locked: Path | None) -> Fate:
    """Whether the process that has taken a prefix for its job still runs; unknown for scripts, and on other machines.

    `locked`: the run directory of which this process holds the lock.
    """
    try:
        process, run_dir = owner["process"], Path(owner["run_dir"])
        # In another container this path may be that of another directory: our own lock says nothing about it.
        if run_dir == locked and process["namespace"] != describe_this_process()["namespace"]:
            return Fate.UNKNOWN
        return fate(process, run_dir)
    except (KeyError, TypeError, AttributeError):
        return Fate.UNKNOWN


def _described(owner: dict[str, Any] | None) -> str:
    if not owner:
        return "it has no owner.json"
    since = owner.get("at")
    at = time.localtime(since if isinstance(since, int | float) else 0)
    return f"of host {owner.get('host')}, since {time.strftime('%Y-%m-%d %H:%M:%S', at)}"
