"""Checkpoints: torch.distributed.checkpoint's files for the tensors, and one small readable file for the rest.

A checkpoint is written as `checkpoints/.step-N.tmp` and renamed to `checkpoints/step-N` when all of it is on disk: what
has that name is whole. One replica saves, in a thread, while training goes on. All replicas hold the same state, so
any other can take over.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recover.world import ending

FACTS = "trainer.json"


@dataclass(frozen=True)
class Found:
    """A whole checkpoint on disk."""

    path: Path
    step: int

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.path / FACTS).read_text())
        return facts


def latest(run_dir: Path) -> Found | None:
    """The newest whole checkpoint of a run."""
    found = _all(run_dir / "checkpoints")
    return found[-1] if found else None


def _all(directory: Path) -> list[Found]:
    numbered = [(re.fullmatch(r"step-(\d+)", path.name), path) for path in directory.glob("step-*")]
    return sorted(
        (Found(path, int(match[1])) for match, path in numbered if match), key=lambda found: found.step
    )


class Tensors:
    """Model and optimizer as torch.distributed.checkpoint sees them: every rank of a replica brings its part.

    The files hold whole tensors under the names of the whole model, so they fit any other way of sharing it out.
    """

    def __init__(self, model: Any, optimizer: Any, replica_size: int) -> None:
        import torch.distributed as dist

        from recover.replica.group import TIMEOUT

        self._model, self._optimizer = model, optimizer
        # A group of its own: it is used by the saving thread while the replica computes.
        self._ranks = (
            {"process_group": dist.new_group(backend="gloo", timeout=TIMEOUT)}
            if replica_size > 1
            else {"no_dist": True}
        )

    def load(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is no process group: we know
            dcp.load(state, checkpoint_id=path, **self._ranks)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_options(),
        )

    def save(self, path: Path) -> Future[Any]:
        """Copy them now and write them in a thread."""
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            saving = dcp.async_save(self._state(), checkpoint_id=path, **self._ranks)
        assert isinstance(saving, Future)
        return saving

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(self._model, self._optimizer, options=_options())
        return {"model": weights, "optimizer": moments}


def _options() -> Any:
    """By parameter, not by group: a rank of a pipeline has only some of a group's parameters."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=True)


class Saver:
    """Saves for one rank of a replica, one checkpoint at a time. The `first` of its ranks names and publishes them."""

    def __init__(self, run_dir: Path, every: int, keep: int, first: bool = True, alone: bool = True) -> None:
        self._directory, self._every, self._keep, self._first = run_dir / "checkpoints", every, keep, first
        self._alone = alone  # the replica has no other rank
        self._newest: int | None = None  # None: this rank has not looked yet
        self._idle = threading.Event()
        self._idle.set()

    def due(self, step: int) -> bool:
        """Whether one is missing that should be there: this step's, or one that a writer died over."""
        return bool(self._every) and self._idle.is_set() and self.newest() < step // self._every * self._every

    def newest(self) -> int:
        """The step of the newest checkpoint, tried or there; 0 if there is none."""
        if self._newest is None:
            self._newest = self._tidy()
        return self._newest

    def save(self, step: int, tensors: Tensors, facts: dict[str, Any]) -> None:
        self.finish()
        draft = self._directory / f".step-{step}.tmp"
        self._newest = step
        try:
            saving = tensors.save(draft)
        except Exception as error:
            if not self._alone:
                raise  # its mates are saving already, and would wait for this rank for ever
            self._failed(draft, error)
            return
        self._idle.clear()
        saving.add_done_callback(lambda done: self._publish(draft, step, facts, done))

    def distrust(self, step: int) -> None:
        """The replica that wrote the checkpoint of this step may have been damaged when it did."""
        path = self._directory / f"step-{step}"
        if path.exists():
            _remove(path, step)
            self._newest = None

    def finish(self) -> None:
        """Wait until what is being saved is on disk, or has failed."""
        self._idle.wait()

    def _publish(self, draft: Path, step: int, facts: dict[str, Any], done: Future[Any]) -> None:
        try:
            done.result()
            if not self._first:
                return
            with open(draft / FACTS, "w") as file:
                file.write(json.dumps(facts, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            _flush(draft)
            draft.rename(self._directory / f"step-{step}")
            _flush(self._directory)
            for old in _all(self._directory)[: -self._keep]:
                _remove(old.path, old.step)
        except Exception as error:
            self._failed(draft, error)
        finally:
            self._idle.set()

    def _failed(self, draft: Path, error: Exception) -> None:
        """Training is worth more than a checkpoint: say so and go on."""
        if not self._first:
            return
        shutil.rmtree(draft, ignore_errors=True)
        text = f"the checkpoint {draft.stem[1:]} could not be written ({error}); the one before it stands"
        ending.log(text)
        print(f"recover: {text}", flush=True)

    def _tidy(self) -> int:
        """Remove what a dead writer has left half done; the step of the newest that is whole."""
        for leftover in [*self._directory.glob(".step-*.tmp"), *self._directory.glob(".gone-*")]:
            shutil.rmtree(leftover, ignore_errors=True)
        found = _all(self._directory)
        return found[-1].step if found else 0


def _remove(path: Path, step: int) -> None:
    gone = path.with_name(f".gone-{step}")
    path.rename(gone)  # first: half a checkpoint must not have a checkpoint's name
    shutil.rmtree(gone, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
