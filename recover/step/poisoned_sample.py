"""Poisoned samples: a sample that kills each replica that computes it would cost every replica, one
after the other.

A rank that raises while it computes a slot writes a note before it dies; ranks that kill a
hanging rank write one for it. A slot that is named in the notes of two replicas ends the run.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection

from recover.job.grid import Grid
from recover.world.slot_notes import Notes


class PoisonedSampleError(RuntimeError):
    """The same slot has killed two replicas."""


def leave_note(notes: Notes, step: int, suspects: list[tuple[int, int]], error: BaseException) -> None:
    """Write a note: this rank is about to die of an exception while it computes these pairs of slot
    and sample; several in a round."""
    notes.leave(step, suspects, "it raised:\n" + "".join(traceback.format_exception(error)))


def check(notes: Notes, step: int, grid: Grid, members: Collection[int] = ()) -> None:
    """Raise PoisonedSampleError, on all survivors alike, if a slot has killed two replicas. Called after
    every repair with its members.

    Only notes of lost ranks count: a living rank may have just written one, in the next attempt,
    and a survivor that has read it would end before the others know of it.
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
