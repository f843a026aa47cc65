"""A sample that breaks whoever computes it: handed from survivor to survivor, it would cost every replica.

A rank that raises while it computes a slot leaves a note before it dies; so do its peers before they kill one that does
not come to an end. A slot that is named in the notes of two replicas ends the run.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection

from recover.job.grid import Grid
from recover.world.slot_notes import Notes


class PoisonedSampleError(RuntimeError):
    """The same slot has cost two replicas."""


def leave_note(notes: Notes, step: int, suspects: list[tuple[int, int]], error: BaseException) -> None:
    """This rank is about to die of an exception while it computes these slots (and samples); several in a round."""
    notes.leave(step, suspects, "it raised:\n" + "".join(traceback.format_exception(error)))


def check(notes: Notes, step: int, grid: Grid, members: Collection[int] = ()) -> None:
    """Called after every repair, with who is left. Raises PoisonedSampleError on all survivors alike.

    Only the notes of the lost count: one that is left may have written its own just now, of the next attempt, and who
    has read it would end before the others know.
    """
    lost: dict[tuple[int, int], dict[int, str]] = {}
    for note in notes.read(step):
        if note.rank in members:
            continue
        for suspect in note.suspects:
            lost.setdefault(suspect, {})[grid.replica(note.rank)] = note.why
    for (slot, sample), said in sorted(lost.items()):
        if len(said) > 1:
            raise PoisonedSampleError(
                f"slot {slot} of step {step} (sample {sample}) has cost replicas "
                f"{', '.join(map(str, sorted(said)))}; a third would fare no better. Mend or skip this sample. "
                f"Of the first of them, {min(said)}: {said[min(said)]}"
            )
