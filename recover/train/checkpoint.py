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


def tensors_of(model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def load(path: Path, model: Any, optimizer: Any) -> None:
    """Fill model and optimizer from a checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = tensors_of(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is no process group: we know
        dcp.load(state, checkpoint_id=path, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Saver:
    """Saves for one rank, one checkpoint at a time."""

    def __init__(self, run_dir: Path, every: int, keep: int) -> None:
        self._directory, self._every, self._keep = run_dir / "checkpoints", every, keep
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

    def save(self, step: int, tensors: dict[str, Any], facts: dict[str, Any]) -> None:
        """Copy the tensors now and write them in a thread."""
        import torch.distributed.checkpoint as dcp

        self.finish()
        draft = self._directory / f".step-{step}.tmp"
        self._newest = step
        try:
            draft.mkdir(parents=True)
            (draft / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there is no process group: we know
                saving = dcp.async_save(tensors, checkpoint_id=draft, no_dist=True)
        except OSError as error:
            self._failed(draft, error)
            return
        assert isinstance(saving, Future)
        self._idle.clear()
        saving.add_done_callback(lambda done: self._publish(draft, step, done))

    def finish(self) -> None:
        """Wait until what is being saved is on disk, or has failed."""
        self._idle.wait()

    def _publish(self, draft: Path, step: int, done: Future[Any]) -> None:
        try:
            done.result()
            _flush(draft)
            draft.rename(self._directory / f"step-{step}")
            _flush(self._directory)
            for old in _all(self._directory)[: -self._keep]:
                gone = old.path.with_name(f".gone-{old.step}")
                old.path.rename(gone)  # first: half a checkpoint must not have a checkpoint's name
                shutil.rmtree(gone, ignore_errors=True)
        except Exception as error:
            self._failed(draft, error)
        finally:
            self._idle.set()

    def _failed(self, draft: Path, error: Exception) -> None:
        """Training is worth more than a checkpoint: say so and go on."""
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


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
