"""Whether the job of a run is at work, and how it ended: from what its launcher recorded, and, if it
recorded no end, from whether it is still there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from recover.job.owner import Fate, fate, is_locked
from recover.job.record_files import FILES
from recover.runs.records.job_log import job_lines
from recover.runs.records.json_lines import parse
from recover.runs.records.kinds import Line
from recover.runs.records.rank_ends import losses, raised_outside_step, went_well

RUNNING, FINISHED, ENDED, UNKNOWN = "running", "finished", "ended", "unknown"
_LONGEST = 1 << 16  # bytes of a line of steps.jsonl, with room


class JobState(NamedTuple):
    """The state of a job. `text`: a clause for people, such as `ended by SIGINT after step 412`."""

    name: str  # `finished`: with a summary; `ended`: without one; `unknown`: not from this host
    text: str
    is_complete: bool = False  # it has done all that it was to do
    none_left: bool = False  # it ended because all of its ranks were lost

    @property
    def is_over(self) -> bool:
        return self.name in (FINISHED, ENDED)


def job_state(
    run_dir: Path, job: Sequence[Line], summary: Mapping[str, Any], last: Line, planned: int | None
) -> JobState:
    """The state of a job from its records. `job`: the lines of `job_lines`. `last`: the last committed
    step. `planned`: steps that the run is to take, if known."""
    start = next((line for line in reversed(job) if line["what"] == "start"), None)
    if start is None:
        return JobState(FINISHED if summary else ENDED, FINISHED if summary else ENDED, bool(summary))
    since = [line for line in job if line["at"] >= start["at"]]
    # An agent of an earlier run in this directory may end after this run has started.
    own = [line for line in since if line.get("run") == start.get("run")]
    end = next((line for line in reversed(own) if line["what"] == "end"), None)
    step = int(last.get("step", 0))
    after = f" after step {step}" if step else " before its first step"
    owners = _owners(start)
    if end is None or end.get("left"):
        fates = {host: _fate(owner, start, run_dir, bool(summary)) for host, owner in owners.items()}
        if Fate.ALIVE in fates.values():
            return JobState(RUNNING, RUNNING)
        if Fate.UNKNOWN in fates.values():
            return JobState(UNKNOWN, _not_known(start, fates, last))
    name = FINISHED if summary else ENDED
    reached = (
        int(summary.get("steps", 0)) >= planned if planned is not None else bool(summary) and end is None
    )
    if reached:
        return _at_its_end(name, end, since, True)
    if end is None:
        return JobState(name, _vanished(owners, fates) + after)
    return _recorded(name, end, since, after, whole=planned is None)


def is_in_use(run_dir: Path) -> bool:
    """Whether a job runs in this directory, as far as this host can know."""
    locked = is_locked(run_dir)
    if locked is not None:
        return locked
    start = next((line for line in reversed(job_lines(run_dir)) if line["what"] == "start"), {})
    return any(owner and fate(owner, run_dir) is Fate.ALIVE for owner in _owners(start).values())


def last_step(run_dir: Path) -> int:
    """The number of the last committed step that is on disk; 0 if there is none."""
    try:
        lines = FILES.disk.read_end(run_dir / "steps.jsonl", _LONGEST).splitlines()
    except OSError:
        return 0
    numbers = (line.get("step") for line in map(parse, reversed(lines)) if line)
    return next((number for number in numbers if isinstance(number, int)), 0)


def _owners(start: Line) -> dict[str, Any]:
    """The launcher or agents that have recorded no end, by host."""
    return start.get("owners", {start.get("host", ""): start.get("owner")})


def _fate(owner: Mapping[str, Any] | None, start: Line, run_dir: Path, has_summary: bool) -> Fate:
    if owner is not None:
        return fate(owner, run_dir)
    # A record of an older version names no process: the session shows it, on the host of the job.
    return Fate.ALIVE if session_of(start) or not has_summary else Fate.GONE


def session_of(start: Line) -> Path | None:
    """The session directory of a job that runs on this host, if this user may read it."""
    for session in (start.get("sessions") or {"": start.get("session")}).values():
        try:
            if session and (Path(session) / "board").exists():
                return Path(session)
        except OSError:  # of another user
            pass
    return None


def _not_known(start: Line, fates: Mapping[str, Fate], last: Line) -> str:
    hosts = ", ".join(sorted(host for host, one in fates.items() if one is Fate.UNKNOWN))
    at = datetime.fromtimestamp(last.get("at") or start["at"]).isoformat(sep=" ", timespec="seconds")
    what = (
        f"its last step, {last['step']}, was committed at {at}" if last.get("step") else f"it began at {at}"
    )
    return f"not known from this host whether it runs: it was started on {hosts}, and {what}"


def _vanished(owners: Mapping[str, Any], fates: Mapping[str, Fate]) -> str:
    if hosts := sorted(host for host, one in fates.items() if one is Fate.RESTARTED):
        return f"ended with its machine ({', '.join(hosts)} has been restarted since)"
    pids = [owner["pid"] for owner in owners.values() if owner]
    if len(pids) == 1:
        return f"the launcher was killed (pid {pids[0]} is gone)"
    if pids:
        return f"all agents were killed (pids {', '.join(map(str, pids))} are gone)"
    return ENDED


def _recorded(name: str, end: Line, since: Sequence[Line], after: str, whole: bool) -> JobState:
    """The state as the launcher recorded the end. `whole`: a run of a script; only the script knows its last step."""
    if signal := end.get("signal"):
        by = f" on {end['by']}" if end.get("by") else ""
        return JobState(name, f"{'stopped' if end.get('asked') else 'ended'} by {signal}{by}{after}")
    if end.get("reason"):
        return JobState(name, f"{'ended' if end.get('left') else 'failed'}{after}: {end['reason']}")
    exits = [line for line in since if line["what"] == "exit"]
    if exits and not any(went_well(line) for line in exits):
        return JobState(name, f"failed{after}: no rank finished; {losses(exits)}", none_left=True)
    if name == FINISHED and not whole:
        return JobState(name, f"stopped{after}")
    return _at_its_end(name, end, since, whole)


def _at_its_end(name: str, end: Line | None, since: Sequence[Line], is_complete: bool) -> JobState:
    """State of a run that has ended. If a rank raised outside of any step, the launcher ended with exit code 4, and
    the state names the exception."""
    raised = raised_outside_step(line for line in since if line["what"] == "exit")
    code = " (exit code 4)" if end is not None and not end.get("signal") else ""
    return JobState(name, f"{name}, but {raised}{code}" if raised else name, is_complete)
