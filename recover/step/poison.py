"""A sample that breaks whoever computes it: handed from survivor to survivor, it would kill every replica.

A rank that raises while it computes a slot leaves a note before it dies. A slot that is named in the notes of two
replicas ends the run.
"""

from __future__ import annotations

import json
import traceback
from pathlib import Path

from recover.job.grid import Grid
from recover.job.spec import told
from recover.world import ending


class PoisonedSampleError(RuntimeError):
    """The same slot raised on two replicas."""


def leave_note(step: int, suspects: list[tuple[int, int]], error: BaseException) -> None:
    """This rank is about to die of an exception while it computes these slots (and samples); several in a round."""
    path = ending.rank_file("slot")
    if path is not None:
        trace = "".join(traceback.format_exception(error))
        draft = path.with_suffix(".slot.tmp")
        draft.write_text(json.dumps({"step": step, "suspects": suspects, "traceback": trace}))
        draft.replace(path)


def check(step: int, grid: Grid) -> None:
    """Called after every repair. Raises PoisonedSampleError on all survivors alike."""
    job = told()
    if job is None or job.run_dir is None:
        return
    raised: dict[tuple[int, int], dict[int, str]] = {}
    for path in Path(job.run_dir, "ranks").glob("*.slot"):
        note = json.loads(path.read_text())
        if note["step"] == step:
            for slot, sample in note["suspects"]:
                raised.setdefault((slot, sample), {})[grid.replica(int(path.stem))] = note["traceback"]
    for (slot, sample), notes in sorted(raised.items()):
        if len(notes) > 1:
            raise PoisonedSampleError(
                f"slot {slot} of step {step} (sample {sample}) raised on replicas "
                f"{', '.join(map(str, sorted(notes)))}; a third would fare no better. Mend or skip this sample. "
                f"The first of them said:\n{notes[min(notes)]}"
            )
