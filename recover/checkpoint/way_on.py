"""How a run that has ended goes on: from which checkpoint, and by which command."""

from __future__ import annotations

import json
from pathlib import Path

from recover.checkpoint import directory
from recover.job.record_files import FILES
from recover.runs.records.job_log import job_lines
from recover.runs.records.job_state import JobState

NOTE = "checkpoint.json"  # in the run directory: where the script saves its checkpoints


def note_place(run_dir: Path, place: Path, resumes: bool) -> None:
    """Note where the script of a run saves. `resumes`: it also resumes from there."""
    FILES.replace(
        run_dir / NOTE, json.dumps({"path": str(place.absolute()), "resumes": resumes}).encode() + b"\n"
    )


def how_it_ended(run_dir: Path, job: JobState) -> str:
    """The state of a job in words; if it has ended before its time, also how it goes on."""
    return f"{job.text}; {way_on(run_dir)}" if job.is_over and not job.is_complete else job.text


def way_on(run_dir: Path) -> str:
    """How a run of `recover train` or of a script goes on, in words."""
    start = next((line for line in reversed(job_lines(run_dir)) if line["what"] == "start"), {})
    is_script = start.get("script", not (run_dir / "config.yaml").exists())  # the record may be older
    return way_on_of_script(run_dir) if is_script else way_on_of_train(run_dir)


def way_on_of_script(run_dir: Path) -> str:
    try:
        note = json.loads(FILES.read(run_dir / NOTE) or b"{}")
        place, resumes = Path(note["path"]), bool(note["resumes"])
    except (ValueError, KeyError, TypeError):
        return "the script has saved no checkpoint (recover.save)"
    found = directory.latest(place)
    if found is None:
        return f"there is no checkpoint in {place}"
    if resumes:
        return f"the same command goes on from step {found.step + 1} ({found.path})"
    return (
        f"its last checkpoint is {found.path}; a script that calls recover.resume(step, {str(place)!r}) goes on from "
        f"step {found.step + 1}"
    )


def way_on_of_train(run_dir: Path, steps: int | None = None) -> str:
    """How a run of `recover train` goes on, in words. `steps`: the length of the run; a checkpoint of its
    last step is none to go on from."""
    found = directory.latest(run_dir)
    if found and (steps is None or found.step < steps):
        text = f"`recover train --resume {run_dir}` goes on from step {found.step + 1}"
        if not found.is_confirmed:
            text += ", with a state that was saved in an emergency: no vote has compared it"
    else:
        text = "there is no checkpoint to go on from"
    if states := [one for one in directory.undecided(run_dir) if not found or one.step > found.step]:
        names = ", ".join(one.path.name for one in states)
        text += (
            f"; replicas held different states, saved as {names}: to go on from the right one, rename it to "
            f"unconfirmed-{states[-1].step}"
        )
    return text
