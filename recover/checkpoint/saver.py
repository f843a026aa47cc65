"""Saves checkpoints while training continues: first as drafts, which a later vote confirms.

When a checkpoint of step N is taken, it is not known whether that state is right: a bit may have
flipped on the replica that writes it. The vote of step N+1 (or the confirmation after the last
step) compares the state of all replicas. So the checkpoint is a draft until a later vote has
found its writer equal to the others; then it is renamed, and only then are older ones removed. A
draft whose writer died before that vote is removed, and another replica saves again.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from recover.checkpoint import directory
from recover.checkpoint.directory import FACTS, FORMAT, UNCONFIRMED, CheckpointError, Found
from recover.checkpoint.object_storage import Uploader
from recover.checkpoint.tensors import Snapshot, Stored, Tensors, Written
from recover.gradients.state_hash import parameters_digest
from recover.job.record_files import AGAIN, FILES, PATIENCE, is_transient, lacks_room
from recover.world import rank_exit

T = TypeVar("T")
ATTEMPTS = int(PATIENCE / AGAIN)  # to write the last checkpoint, unless the disk is full


class Saver:
    """Saves for one rank of a replica, in order, in a thread of its own.

    The `first` rank of the replica renames drafts and removes old checkpoints; `alone`: the
    replica has one rank. `uploader`: uploads confirmed checkpoints while this is the first replica.
    """

    def __init__(
        self,
        run_dir: Path,
        every: int,
        keep: int,
        replica: int,
        first: bool = True,
        alone: bool = True,
        uploader: Uploader | None = None,
    ) -> None:
        self._run_dir, self._every, self._keep = run_dir, every, keep
        self._directory = run_dir / "checkpoints"
        self._replica, self._first, self._alone = replica, first, alone
        self._uploader, self._uploads = uploader, False
        self._offered = ""  # identity of the last checkpoint that was offered to the uploader
        self._newest: int | None = None  # step of the newest checkpoint or attempt; None: not looked up yet
        self._equal: dict[int, int] = {}  # by replica: the last step whose vote found it equal to the others
        self._unnamed: list[int] = []  # steps of this rank's drafts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recover-saver")
        self._writing: Future[None] | None = None

    def start(self) -> None:
        """Remove drafts of an earlier run, which no vote can confirm. Called by the writing rank before
        the first step."""
        self._newest = self._take_over()
        if self._uploader:
            self._uploader.check_owner()

    def comes(self, step: int, lost: bool) -> bool:
        """Whether a checkpoint may be taken after this step, the same on all replicas: one is
        due, or the writer of a draft may have been lost."""
        return bool(self._every) and (step % self._every == 0 or lost)

    def due(self, step: int) -> bool:
        """Whether this rank should save now. While one checkpoint is being written, the next is
        left out."""
        is_idle = self._writing is None or self._writing.done()
        return self._first and is_idle and self.newest() < step // self._every * self._every

    def lacks(self, step: int, fingerprint: str | None = None) -> bool:
        """Whether there is neither a checkpoint nor a draft of this step.

        fingerprint:  of state that may change without a step; a checkpoint with another one does not count
        """
        if not self._first or self.newest() != step:
            return self._first
        return fingerprint is not None and self._fingerprint(step) != fingerprint

    def newest(self) -> int:
        """The step of the newest checkpoint, draft or attempt; 0 if there is none."""
        if self._newest is None:
            self._newest = self._take_over()
        return self._newest

    def save(
        self,
        step: int,
        tensors: Tensors,
        facts: dict[str, Any],
        beside: Mapping[str, torch.Tensor] | None = None,
        waits: bool = False,
    ) -> None:
        """Copy all tensors now, and write the draft in the thread. All ranks of the replica call
        it.

        beside:  tensors that belong neither to the model nor to the optimizer
        waits:   wait for room on a full disk until there is some: no later step could be saved instead
        """
        self._newest = step
        try:
            snapshot = tensors.snapshot(beside or {})
        except Exception as error:
            if not self._alone:
                raise  # its peers are saving already, and would wait for this rank forever
            self._failed(step, error)
            return
        self._unnamed.append(step)
        self._writing = self._thread.submit(self._write_draft, step, tensors, snapshot, facts, waits)

    def save_unconfirmed(
        self,
        step: int,
        tensors: Tensors,
        facts: dict[str, Any],
        name: str = "",
        beside: Mapping[str, torch.Tensor] | None = None,
    ) -> Path | None:
        """Save at once, since no further vote will come. Returns the path, or None. All ranks of
        the replica call it.

        name:    name of the state of this replica, where replicas hold different states
        beside:  as in `save`
        """
        self.finish()
        try:
            snapshot = tensors.snapshot(beside or {})
        except OSError:
            return None
        return self.save_snapshot(step, snapshot, tensors, facts, name)

    def save_snapshot(
        self, step: int, snapshot: Snapshot, tensors: Tensors, facts: dict[str, Any], name: str = ""
    ) -> Path | None:
        """Save a state that no vote confirms, from any thread; otherwise as `save_unconfirmed`."""
        draft = self._directory / f".lost-{step}-{self._replica}"
        path = self._directory / (name or f"{UNCONFIRMED}-{step}")
        try:
            self._write(draft, tensors, snapshot, facts)
            if self._first:
                draft.rename(path)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            return path if path.exists() else None
        return path

    def newest_on_disk(self) -> int:
        """The step of the newest checkpoint to resume from; 0 if there is none."""
        found = directory.latest(self._run_dir)
        return found.step if found else 0

    def found_equal(self, step: int, replicas: Collection[int]) -> None:
        """The vote of this step has found these replicas equal at its beginning: confirm drafts
        of earlier steps."""
        self._equal |= dict.fromkeys(replicas, step)
        # Hosts with directories of their own have a writer each, and one of them uploads: the lowest replica,
        # which is a writer because ids grow. Its successor offers the newest checkpoint again.
        uploads = self._uploader is not None and self._first and self._replica == min(replicas)
        if uploads and not self._uploads:
            self._thread.submit(self._offer)
        self._uploads = uploads
        good = [draft for draft in self._unnamed if self._is_good(draft, self._replica)]
        for draft in good:
            self._unnamed.remove(draft)
            if self._first:
                self._thread.submit(self._name, draft)  # after it is written

    def finish(self) -> None:
        """Wait until all saves are on disk, or have failed."""
        self._thread.submit(lambda: None).result()

    def finish_uploads(self) -> None:
        """Wait until the last checkpoint is uploaded, or has failed."""
        self.finish()
        if self._uploader and self._uploads:
            self._uploader.finish()

    def expect_vote(self, step: int) -> None:
        """A draft of this step that is written from now on needs a vote of its own: earlier votes on
        the step were about an earlier draft. All ranks call it."""
        self._equal = {replica: seen for replica, seen in self._equal.items() if seen <= step}

    def _is_good(self, step: int, writer: int) -> bool:
        return self._equal.get(writer, 0) > step

    def _fingerprint(self, step: int) -> str | None:
        """The fingerprint in the draft of this step, or in its checkpoint; None if there is none."""
        self.finish()
        for kind in ("draft", "step"):
            try:
                found: str | None = Found(self._directory / f"{kind}-{step}", step).facts().get("fingerprint")
            except CheckpointError:
                continue
            return found
        return None

    def _write_draft(
        self, step: int, tensors: Tensors, snapshot: Snapshot, facts: dict[str, Any], waits: bool
    ) -> None:
        try:
            self._write(self._directory / f"draft-{step}", tensors, snapshot, facts, waits)
        except Exception as error:
            self._failed(step, error)

    def _write(
        self, draft: Path, tensors: Tensors, snapshot: Snapshot, facts: dict[str, Any], waits: bool = False
    ) -> None:
        # All ranks of the replica write tensors, and fail together or not at all: so all of them
        # make the same number of attempts. Only the first rank writes the facts.
        repeated = partial(self._repeated, draft, snapshot.nbytes) if waits else _once
        written = repeated(partial(tensors.write, draft, snapshot))
        if self._first:
            repeated(partial(self._write_facts, draft, written, facts))

    def _repeated(self, draft: Path, size: int, write: Callable[[], T]) -> T:
        """Write until it succeeds, or fails for good. `size`: bytes of this rank's tensors.

        A full disk is waited for without limit: an operator makes room. Other errors, such as a file
        system that has become read-only, may never pass, and a waiting job holds its GPUs.
        """
        is_reported, attempts = not self._first, 0
        while True:
            try:
                return write()
            except Exception as error:
                attempts += 1
                if not is_transient(error) or (attempts >= ATTEMPTS and not lacks_room(error)):
                    raise
                if not is_reported:
                    is_reported = True
                    rank_exit.report(
                        f"the last checkpoint cannot be written ({error}): it takes {size / 1e6:,.1f} MB"
                        f"{'' if self._alone else ' for each rank of the replica'}, and {self._directory} has "
                        f"{_free(self._directory) / 1e6:,.1f} MB left; the run waits with all of its steps until there "
                        "is room, and for other causes up to 300 s: make room there, or give up by Ctrl-C twice"
                    )
            FILES.pause()

    def _write_facts(self, draft: Path, written: Written, facts: dict[str, Any]) -> None:
        with Stored(draft, written.files) as stored:
            digest = parameters_digest((name, stored.whole(name)) for name in written.parameters)
        facts = {"format": FORMAT, **facts, "writer": self._replica}
        facts |= {"parameters_digest": digest, "files": written.files}
        with open(draft / f"{FACTS}.tmp", "w") as file:
            file.write(json.dumps(facts, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        (draft / f"{FACTS}.tmp").rename(draft / FACTS)  # last: a directory with this file is complete
        _flush(draft)
        _flush(self._directory)

    def _name(self, step: int) -> None:
        """Rename a confirmed draft, and remove all but the last `keep` checkpoints."""
        draft, path = self._directory / f"draft-{step}", self._directory / f"step-{step}"
        try:
            if not (draft / FACTS).exists():
                return  # it could not be written
            # A rank that was declared dead and still lives may do the same now: a good checkpoint
            # is never removed.
            if path.exists() and _are_copies(draft, path):
                shutil.rmtree(draft, ignore_errors=True)
            else:
                # The new checkpoint gets its name before the old one is deleted, which takes long.
                gone = _set_aside(path) if path.exists() else None
                draft.rename(path)
                _flush(self._directory)
                if gone:
                    shutil.rmtree(gone, ignore_errors=True)
            old = directory.all_good(self._run_dir)[: -self._keep]
            old += [found for found in directory.unconfirmed(self._run_dir) if found.step <= step]
            old += [found for found in directory.undecided(self._run_dir) if found.step <= step]
            for found in old:
                if not (self._uploader and self._uploader.holds(found)):
                    _remove(found.path)
        except OSError as error:
            self._failed(step, error)
        if self._uploads:
            self._offer()

    def _offer(self) -> None:
        """Have the newest confirmed checkpoint uploaded."""
        found = directory.all_good(self._run_dir)
        if self._uploader and found and (identity := found[-1].identity()) != self._offered:
            self._offered = identity
            self._uploader.offer(found[-1])

    def _failed(self, step: int, error: Exception) -> None:
        """Report the failure and go on: training is worth more than a checkpoint."""
        if not self._first:
            return
        shutil.rmtree(self._directory / f"draft-{step}", ignore_errors=True)
        text = f"the checkpoint of step {step} could not be written ({error}); the one before it stands"
        rank_exit.report(text)

    def _take_over(self) -> int:
        """Take over drafts of a dead writer: rename the confirmed ones, remove the others. Returns the step
        of the newest checkpoint."""
        for draft in directory.drafts(self._run_dir):
            try:
                good = self._is_good(draft.step, draft.facts()["writer"])
            except CheckpointError:
                good = False  # its writer died while writing it
            if good:
                self._name(draft.step)
            else:
                rank_exit.log(f"removed {draft.path}: its writer was lost before a vote had confirmed it")
                _remove(draft.path)
        for leftover in (*self._directory.glob(".gone-*"), *self._directory.glob(".lost-*")):
            shutil.rmtree(leftover, ignore_errors=True)
        found = directory.all_good(self._run_dir)
        return found[-1].step if found else 0


def _are_copies(draft: Path, path: Path) -> bool:
    try:
        return Found(draft, 0).identity() == Found(path, 0).identity()
    except CheckpointError:
        return not (draft / FACTS).exists()  # it has just been renamed to the other one


def _remove(path: Path) -> None:
    # Renamed first: half a checkpoint must not have the name of a checkpoint.
    shutil.rmtree(_set_aside(path), ignore_errors=True)


def _set_aside(path: Path) -> Path:
    gone = path.with_name(f".gone-{path.name}-{time.time_ns()}")
    path.rename(gone)
    return gone


def _once(write: Callable[[], T]) -> T:
    return write()


def _free(path: Path) -> int:
    """Bytes that are left where this path is, or will be; 0 if that is not known."""
    try:
        return shutil.disk_usage(next(one for one in (path, *path.parents) if one.exists())).free
    except OSError:
        return 0


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
