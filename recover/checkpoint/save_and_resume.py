"""`recover.save` and `recover.resume`: checkpoints for the user's own loop.

The files are those of `recover train`: `PATH/checkpoints/step-N`, whole tensors under the names
of the whole model, so that any number of replicas, sharded or not, can resume from them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from recover.checkpoint import directory, diverged
from recover.checkpoint.confirmed import save_confirmed
from recover.checkpoint.object_storage import ObjectStorage, Uploader, is_url, owner_of
from recover.checkpoint.saver import Saver
from recover.checkpoint.tensors import Part, Stored, Tensors
from recover.checkpoint.way_on import note_place
from recover.job.leave_request import LeaveRequest
from recover.step.errors import StateDivergedError
from recover.step.joining.extra import digest_of, is_extra, restore, state_of
from recover.step.joining.packing import NamedTensors, pack, unpack
from recover.step.state import StepState
from recover.world import rank_exit
from recover.world.calls import Call
from recover.world.retry import retry_after_repair
from recover.world.writers import writing_replicas

if TYPE_CHECKING:
    from recover.step.step import Step


def save(step: Step, path: str | Path, extra: Mapping[str, Any] | None = None, keep: int = 2) -> None:
    """Write the state after the last committed step to `path`/checkpoints/step-N, and return when
    it is there.

    All replicas must call it after the same step. The first living replica writes; if it dies
    meanwhile, the next one does. The checkpoint is a draft until all replicas were found to hold
    the same state, `extra` included. A second call after the same step replaces the checkpoint if
    `extra` has changed. If the disk is full, that is reported, and the checkpoint before it stays.
    Raises CheckpointError with the name of an entry of the optimizer or the model,
    TypeError with that of an entry of `extra`, that no file can hold.

    extra:  entries to save in addition to `Step(extra=)`, by name: objects with state_dict() and load_state_dict(),
            tensors, numpy arrays, numbers, strings, lists, dicts. Joining replicas do not receive them: give to Step
            what changes during the run
    keep:   number of confirmed checkpoints to keep; older ones are removed
    path:   a directory, or a URL such as s3://BUCKET/PREFIX: then it returns when the checkpoint is on the local
            disk, and uploads it in the background; the end of the script waits for the last upload
    """
    if keep < 1:
        raise ValueError(f"keep={keep} must be at least 1")
    step.refuse_on_one_replica("recover.save")
    if not step.index:
        raise ValueError("there is nothing to save before the first step is committed; save after one")
    if step.replay is not None:
        return  # a replay leaves nothing behind
    with step.world.call(Call.SAVE), step.saving():
        _save(step, path, extra, keep)


def _save(step: Step, path: str | Path, extra: Mapping[str, Any] | None, keep: int) -> None:
    place = _place(step, path)
    found = directory.latest(place)
    if found is not None and found.step > step.index:
        raise ValueError(
            f"{found.path} is of a later step than {step.index}: another run's; recover.resume goes on from it, or "
            "give another path"
        )
    world, state = step.world, step.state(extra)
    tensors, packed = _packed(state)
    kept = _kept(step)
    kept.path = place
    kept.note_place()
    kept.tensors.refuse_unsavable()  # by all replicas, before one of them writes
    digests = {name: digest_of(value) for name, value in state.named().items()}
    # A script may save twice after one step, and change `extra` in between; and a directory may hold the
    # checkpoint of another run after as many steps, which had another loss.
    fingerprint = f"{zlib.crc32(repr((sorted(digests.items()), step.loss)).encode()):08x}"
    saver = kept.saver(kept.path, keep, path if isinstance(path, str) and is_url(path) else None)
    saver.expect_vote(step.index)

    def write() -> None:
        facts = {"step": step.index, "position": step.state_dict(), "state": packed}
        facts["fingerprint"] = fingerprint
        saver.save(step.index, kept.tensors, facts, tensors)

    def act() -> None:
        compare()
        save_confirmed(world, step, saver, write, lambda *_: None, fingerprint)
        if world.replica in writing_replicas(world):
            saver.finish()

    with step.saving_extra(extra or {}, digests) as compare:
        retry_after_repair(world, Call.SAVE, act, lambda *_: None)


def save_states(step: Step, error: StateDivergedError) -> None:
    """Save each of the different states that replicas hold, where the script saves its checkpoints, or
    in the job's run directory.

    Called by `Step` on all ranks, before the error ends them.
    """
    kept, run_dir = _kept(step), step.world.job.run_dir
    path = kept.path or (Path(run_dir) if run_dir else None)
    if path is None or not step.index:
        error.say("go on from the last checkpoint")
        return

    def facts() -> tuple[dict[str, Any], Mapping[str, torch.Tensor]]:
        tensors, packed = _packed(step.state())
        return {"step": step.index, "position": step.state_dict(), "state": packed}, tensors

    diverged.save_states(step.world, step.index, error, kept.saver(path, 1), kept.tensors, facts)


def resume(
    step: Step, path: str | Path, extra: Mapping[str, Any] | None = None, *, rebatch: bool = False
) -> dict[str, Any] | None:
    """Resume from the newest confirmed checkpoint under `path`. Returns None if there is none, and
    the run starts new.

    All replicas must call it before the first step. Model, optimizer, scheduler and position are
    filled in place, for any number of replicas and of ranks in each that has saved them; every file
    is compared with its digest first. Objects and dicts in `extra` get their state back, by name,
    and belong to `step.extra` afterwards. Returns all saved extras as plain values and tensors. A
    joining replica returns None: it receives the state of the members.

    path:     a directory, or a URL that `recover.save` uploads to
    rebatch:  allow another global batch; no sample is used twice, none is left out
    """
    step.refuse_on_one_replica("recover.resume")
    kept = _kept(step)
    if step.replay is None:
        kept.path, kept.resumes = _place(step, path), True
    for name, value in (extra or {}).items():
        if is_extra(value):
            step.extra.setdefault(name, value)
    if step.world.outside:
        return None
    kept.note_place()
    with step.world.call(Call.RESUME):
        return _resume(step, path, extra, rebatch)


def _resume(
    step: Step, path: str | Path, extra: Mapping[str, Any] | None, rebatch: bool
) -> dict[str, Any] | None:
    if step.index:
        raise ValueError(f"step {step.index} is committed already; resume before the first one")
    found = _newest(step, path)
    if found is None:
        return None
    if step.world.shard == 0:
        found.verify()
    facts, state = found.facts(), step.state(extra)
    if "state" not in facts:
        raise directory.CheckpointError(
            f"{found.path} was not written by recover.save; go on with it by `recover train --resume {path}`"
        )
    _kept(step).tensors.load(found.path, facts["files"])
    with Stored(found.path, facts["files"]) as stored:
        given = state.named()
        for name, value in given.items():
            if not is_extra(value):
                continue
            if name not in facts["state"]:
                raise directory.CheckpointError(
                    f"{found.path} has no {name}; it was saved without it: to go on from it, add this entry to "
                    "step.extra after recover.resume"
                )
            held = NamedTensors()
            pack(state_of(value), name, held)
            restore(value, unpack(facts["state"][name], _Found(stored, held)))
        saved = {
            name.removeprefix(StepState.EXTRA): unpack(packed, _Found(stored, {}))
            for name, packed in facts["state"].items()
            if name.startswith(StepState.EXTRA)
        }
    step.load_state_dict(facts["position"], rebatch=rebatch)
    step.report_resume(str(found.path), saved)
    return saved


def _place(step: Step, path: str | Path) -> Path:
    """The directory that holds the checkpoints: for a URL, the one in which they wait for their upload."""
    if not (isinstance(path, str) and is_url(path)):
        return Path(path)
    name = hashlib.sha256(path.rstrip("/").encode()).hexdigest()[:12]
    run_dir = step.world.job.run_dir
    return Path(run_dir or Path(tempfile.gettempdir(), f"recover-{os.getuid()}"), "uploads", name)


def _newest(step: Step, path: str | Path) -> directory.Found | None:
    """The checkpoint to resume from, downloaded if need be; the same on all ranks."""
    if step.replay is not None:
        return directory.found_at(Path(step.replay.checkpoint)) if step.replay.checkpoint else None
    place = _place(step, path)
    if not (isinstance(path, str) and is_url(path)):
        return directory.latest(place)
    place.mkdir(parents=True, exist_ok=True)
    with open(place / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one rank of a host downloads, the others find the files
        storage = ObjectStorage(path)
        stored, found = storage.newest(), directory.latest(place)
        if stored is not None and (found is None or found.step < stored.step):
            found = storage.download(stored, place)
    if found and (stored is None or found.step > stored.step) and len(step.world.job.directories) > 1:
        raise directory.CheckpointError(
            f"{found.path} was never uploaded: {path} has {f'step {stored.step}' if stored else 'none'}, and other "
            "hosts do not see this directory; move it away on all hosts, or copy it to all of them"
        )
    if step.world.shard == 0 and step.world.replica == min(step.world.replicas):
        storage.claim(owner_of(step.world.job))
    return found


class _Found:
    """Finds tensors of a checkpoint: whole ones, or this rank's part of a sharded tensor with
    the same name."""

    def __init__(self, stored: Stored, held: Mapping[str, torch.Tensor]) -> None:
        self._stored, self._held = stored, held

    def __call__(self, name: str) -> torch.Tensor:
        here = self._held.get(name)
        if here is None or not hasattr(here, "to_local"):
            return self._stored.whole(name)
        self._stored.fill(name, Part.of(here))
        return here


def _packed(state: StepState) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = NamedTensors()
    return tensors, {name: pack(state_of(value), name, tensors) for name, value in state.named().items()}


class _Kept:
    """Groups and threads that are created once for a step."""

    def __init__(self, step: Step) -> None:
        state, world = step.state(), step.world
        self.tensors = Tensors(state.model, state.optimizer, world.grid.replica_size)
        self._world, self._savers = world, dict[tuple[Path, int], Saver]()
        self.path: Path | None = None  # where the script saves
        self.resumes = False  # whether it also resumes from there
        self._noted: tuple[Path | None, bool] = None, False

    def note_place(self) -> None:
        """Record the place in the run directory, for `recover status` of a run that has ended."""
        world, job, place = self._world, self._world.job, (self.path, self.resumes)
        if self.path is None or not job.records or not job.run_dir or place == self._noted:
            return
        self._noted = place
        if world.shard == 0 and world.replica in writing_replicas(world):
            note_place(Path(job.run_dir), self.path, self.resumes)

    def saver(self, path: Path, keep: int, url: str | None = None) -> Saver:
        world, key = self._world, (path.absolute(), keep)
        if key not in self._savers:
            alone = world.grid.replica_size == 1
            uploader = Uploader(url, owner_of(world.job), keep) if url else None
            saver = Saver(path, 0, keep, world.replica, world.shard == 0, alone, uploader)
            self._savers[key] = saver
            if uploader:
                rank_exit.on_success(lambda: self._finish(saver))
        return self._savers[key]

    def _finish(self, saver: Saver) -> None:
        """At the end of the script: the agent of a host that is to leave waits for the last upload."""
        LeaveRequest(self._world.job.session).note_agreement()
        saver.finish_uploads()


_all_kept: WeakKeyDictionary[Step, _Kept] = WeakKeyDictionary()


def _kept(step: Step) -> _Kept:
    if step not in _all_kept:
        _all_kept[step] = _Kept(step)
    return _all_kept[step]
