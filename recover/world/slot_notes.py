"""Notes on slots: the microbatches that a rank computed when it raised, or when its peers killed it
because it hung.

Notes are files in the run directory (`ranks/<rank>.slot`), so all survivors read the same. They are
written before the rank dies: so the repair that follows finds them.
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
    """Storage of notes."""

    def leave(
        self, step: int, suspects: Sequence[tuple[int, int]], why: str, rank: int | None = None
    ) -> None:
        """Leave a note that this rank, or `rank`, is about to die while it computes these slots."""

    def read(self, step: int) -> Iterable[Note]:
        """The notes on this step."""


class RunNotes:
    """Notes in the run directory. Without one, nothing is written and nothing found."""

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
                # From the disk only: other ranks cannot read a note that waits in this process for
                # room on the disk.
                note = json.loads(FILES.disk.read(path))
            except (OSError, ValueError):
                continue
            if note["step"] == step:
                suspects = tuple((slot, sample) for slot, sample in note["suspects"])
                yield Note(int(path.stem), suspects, note["why"])


def blamed(notes: Notes, step: int) -> frozenset[tuple[int, int]]:
    """The slots, with their samples, over which a rank was lost in this step."""
    return frozenset(suspect for note in notes.read(step) for suspect in note.suspects)
