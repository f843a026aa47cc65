"""Checkpoints on disk: `checkpoints/step-N`, with safetensors files and one readable file,
`trainer.json`.

step-N                   complete, and confirmed by a later vote
draft-N                  not confirmed yet; no run resumes from it (see `recover.checkpoint.saver`)
unconfirmed-N            complete, saved after all of etcd was lost, or when all hosts were asked to leave in a step, so
                         that no vote has confirmed it; a run that resumes from it reports that
unconfirmed-N-replica-R  one of several different states, without a majority that tells which is right; no run resumes
                         from it until a person renames it
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FACTS = "trainer.json"
FORMAT = 2  # 1 was torch.distributed.checkpoint's own, with pickle
UNCONFIRMED = "unconfirmed"
READERS = 8  # files that are hashed at once


class CheckpointError(ValueError):
    """A checkpoint that must not be loaded."""


@dataclass(frozen=True)
class Found:
    """A checkpoint or draft on disk."""

    path: Path
    step: int

    def facts(self) -> dict[str, Any]:
        """The contents of `trainer.json`. Raises CheckpointError if it cannot be read."""
        try:
            facts: dict[str, Any] = json.loads(self.read_facts())
            form = facts.get("format", 1)
            if form == FORMAT and not isinstance(facts.get("files"), dict):
                raise ValueError("it lists no files")
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{self.place}/{FACTS} cannot be read ({error}); {self.mend()}") from None
        if form != FORMAT:
            raise CheckpointError(
                f"{self.place} has format {form}, and this version reads format {FORMAT} only: older ones hold "
                f"pickles, which can run any code when they are read; {self.mend()}"
            )
        return facts

    @property
    def place(self) -> str:
        """The path of the checkpoint, for messages."""
        return str(self.path)

    def read_facts(self) -> str:
        """The text of `trainer.json`. Raises OSError."""
        return (self.path / FACTS).read_text()

    @property
    def is_confirmed(self) -> bool:
        """Whether a vote has compared it with the state of the other replicas."""
        return not self.path.name.startswith(UNCONFIRMED)

    def identity(self) -> str:
        """A text that is the same for copies of a checkpoint, and for checkpoints of one state that several
        replicas have written."""
        return f"step {self.step} ({self.digest()})"

    def digest(self) -> str:
        """A digest of the contents of all files."""
        facts = {name: value for name, value in self.facts().items() if name != "writer"}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]

    def verify(self) -> None:
        """Raises CheckpointError unless every file has the contents that were written."""
        files: Mapping[str, str] = self.facts()["files"]
        with ThreadPoolExecutor(READERS) as pool:
            for name, digest in zip(files, pool.map(self._digest, files), strict=True):
                if digest != files[name]:
                    raise CheckpointError(
                        f"{self.path / name} is damaged: its SHA-256 should be {files[name]} and is {digest}; "
                        f"{self.mend()}"
                    )

    def mend(self) -> str:
        """The remedy: what to do instead of loading this checkpoint."""
        older = [found for found in all_good(self.path.parents[1]) if found.step < self.step]
        if older:
            return f"move it away, and --resume (recover.resume) goes on from {older[-1].path.name}"
        return "there is no older one: start again without --resume (recover.resume)"

    def _digest(self, name: str) -> str:
        path = self.path / name
        if Path(name).name != name:
            raise CheckpointError(f"{self.path} lists a file outside of itself, {name!r}; {self.mend()}")
        return file_digest(path) if path.is_file() else "not there"


def found_at(path: Path) -> Found:
    """The checkpoint in this directory, which has the name step-N."""
    return Found(path, int(path.name.rpartition("-")[2]))


def latest(run_dir: Path) -> Found | None:
    """The newest checkpoint to resume from: a confirmed one, or a newer one that was saved after
    the loss of etcd."""
    found = sorted([*unconfirmed(run_dir), *all_good(run_dir)], key=lambda found: found.step)
    return found[-1] if found else None


def all_good(run_dir: Path) -> list[Found]:
    """Confirmed checkpoints, oldest first."""
    return _named("step", run_dir / "checkpoints")


def unconfirmed(run_dir: Path) -> list[Found]:
    """Checkpoints that were saved when no vote was possible any more, oldest first."""
    return _named(UNCONFIRMED, run_dir / "checkpoints")


def undecided(run_dir: Path) -> list[Found]:
    """Different states without a majority, oldest first."""
    return _named(UNCONFIRMED, run_dir / "checkpoints", r"-replica-\d+")


def drafts(run_dir: Path) -> list[Found]:
    """Drafts, including incomplete ones."""
    return _named("draft", run_dir / "checkpoints")


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _named(kind: str, directory: Path, suffix: str = "") -> list[Found]:
    pattern = re.compile(rf"{kind}-(\d+){suffix}")
    numbered = [(pattern.fullmatch(path.name), path) for path in directory.glob(f"{kind}-*")]
    return sorted(
        (Found(path, int(match[1])) for match, path in numbered if match),
        key=lambda found: (found.step, found.path.name),
    )
