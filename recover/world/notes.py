"""Notes on slots: what a rank was computing when it was lost over it, by an exception of its own or by its peers.

They lie in the run directory (`ranks/<rank>.slot`), so all survivors read the same. Whoever writes one does so before
the rank dies: the repair that follows finds it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from recover.job.spec import told
from recover.world import ending


@dataclass(frozen=True)
class Note:
    rank: int
    suspects: tuple[tuple[int, int], ...]  # slots and samples; several in a round
    why: str


def leave(step: int, suspects: Sequence[tuple[int, int]], why: str, rank: int | None = None) -> None:
    """This rank, or one that cannot speak for itself, is about to die while it computes these slots."""
    path = ending.rank_file("slot", rank)
    if path is not None:
        draft = path.with_suffix(f".{os.getpid()}.tmp")  # several may speak for the same one
        draft.write_text(json.dumps({"step": step, "suspects": suspects, "why": why}))
        draft.replace(path)


def read(step: int) -> Iterator[Note]:
    """The notes on this step. Without a run directory there are none."""
    job = told()
    if job is not None and job.run_dir is not None:
        for path in sorted(Path(job.run_dir, "ranks").glob("*.slot")):
            note = json.loads(path.read_text())
            if note["step"] == step:
                yield Note(
                    int(path.stem), tuple((slot, sample) for slot, sample in note["suspects"]), note["why"]
                )


def blamed(step: int) -> frozenset[tuple[int, int]]:
    """The slots, and their samples, that somebody was lost over in this step."""
    return frozenset(suspect for note in read(step) for suspect in note.suspects)
