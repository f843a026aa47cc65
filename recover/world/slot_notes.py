"""Notes on slots: what a rank was computing when it was lost over it, by an exception of its own or by its peers.

They lie in the run directory (`ranks/<rank>.slot`), so all survivors read the same. Whoever writes one does so before
the rank dies: the repair that follows finds it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from recover.job.record_files import FILES


@dataclass(frozen=True)
class Note:
    rank: int
    suspects: tuple[tuple[int, int], ...]  # slots and samples; several in a round
    why: str


class Notes(Protocol):
    """Where notes are left and read."""

    def leave(
        self, step: int, suspects: Sequence[tuple[int, int]], why: str, rank: int | None = None
    ) -> None:
        """This rank, or one that cannot speak for itself, is about to die while it computes these slots."""

    def read(self, step: int) -> Iterable[Note]:
        """The notes on this step."""


class RunNotes:
    """Those of this rank, in the run directory. Without one nothing is left, and nothing found."""

    def __init__(self, run_dir: str | None, rank: int) -> None:
        self._directory, self._rank = Path(run_dir, "ranks") if run_dir else None, rank

    def leave(
        self, step: int, suspects: Sequence[tuple[int, int]], why: str, rank: int | None = None
    ) -> None:
        if self._directory is not None:
            path = self._directory / f"{self._rank if rank is None else rank}.slot"
            FILES.replace(path, json.dumps({"step": step, "suspects": suspects, "why": why}).encode())

    def read(self, step: int) -> Iterator[Note]:
        for path in sorted(self._directory.glob("*.slot")) if self._directory else ():
            try:
                note = json.loads(
                    FILES.disk.read(path)
                )  # from disk alone: what waits here nobody else can read
            except (OSError, ValueError):
                continue
            if note["step"] == step:
                suspects = tuple((slot, sample) for slot, sample in note["suspects"])
                yield Note(int(path.stem), suspects, note["why"])


def blamed(notes: Notes, step: int) -> frozenset[tuple[int, int]]:
    """The slots, and their samples, that somebody was lost over in this step."""
    return frozenset(suspect for note in notes.read(step) for suspect in note.suspects)
