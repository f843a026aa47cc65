"""`job.jsonl`: what the launcher saw. On several hosts every agent writes its own, `job-HOST.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recover.job.record_files import FILES
from recover.runs.records.goodput import LaunchTime
from recover.runs.records.json_lines import read
from recover.runs.records.kinds import Line

NAME, OTHERS = "job.jsonl", "job-*.jsonl"
PLACEMENT = "hosts.json"  # placement of the ranks of a job on several hosts
ADDRESS = "page.url"  # file in the run directory with the address of the page, while it is served


class JobLog:
    """The log of one writer. On a full disk, lines wait in memory: they say why ranks died of it."""

    def __init__(self, run_dir: Path, host: str | None = None) -> None:
        self._path = run_dir / (f"job-{host}.jsonl" if host else NAME)

    def write(self, line: Mapping[str, Any]) -> None:
        FILES.append(self._path, json.dumps(line).encode() + b"\n")

    def flush(self) -> None:
        """Try again to write what waits, for all files of this process."""
        FILES.flush()


def hosts_of(run_dir: Path) -> list[str]:
    """The hosts of a job on several hosts; empty for a job on one."""
    try:
        placement = json.loads(FILES.read(run_dir / PLACEMENT) or b"{}")
        return sorted(placement.get("hosts") or ())
    except (ValueError, AttributeError):
        return []


def job_files(run_dir: Path) -> list[Path]:
    return [run_dir / NAME, *sorted(run_dir.glob(OTHERS))]


def job_lines(run_dir: Path) -> list[Line]:
    """The lines of all writers, ordered by time."""
    lines = [line for path in job_files(run_dir) for line in read(path, "at").whole if "what" in line]
    return _one_launch_each(sorted(lines, key=lambda line: line["at"]))


def _one_launch_each(lines: list[Line]) -> list[Line]:
    """Merge the lines of a job on several hosts (`run`): it starts with the first of its agents and ends with the
    last."""
    last: dict[str, Line] = {}
    for line in lines:
        # A host that left while the others went on may be the last one that writes; and only the host
        # that was asked to stop the job knows of the signal.
        known = last.get(line.get("run", ""), line)
        gives_way = (line.get("left") and not known.get("left")) or (
            known.get("asked") and not line.get("signal") and not line.get("reason")
        )
        if "run" in line and line["what"] == "end" and not gives_way:
            last[line["run"]] = line
    told: dict[tuple[str, str], Line] = {}
    found = []
    for line in lines:
        if "run" in line and line["what"] != "end":
            first = told.setdefault((line["what"], line["run"]), line)
            if line["what"] == "start":  # every host has its own session
                first.setdefault("sessions", {})[line.get("host")] = line.get("session")
                first.setdefault("owners", {})[line.get("host")] = line.get("owner")
            if first is not line:
                continue
        if "run" in line and line["what"] == "end" and ("start", line["run"]) in told:
            told["start", line["run"]].setdefault("owners", {}).pop(line.get("host"), None)
        if "run" not in line or line["what"] != "end" or line is last[line["run"]]:
            found.append(line)
    return found


def launches(lines: Iterable[Line]) -> list[LaunchTime]:
    """Every start with its end, if one was recorded: a launcher may be killed."""
    found: list[LaunchTime] = []
    for line in lines:
        if line["what"] == "start":
            size = line.get("replica_size", 1)
            found.append(LaunchTime(line["at"], line.get("ranks", 0) // size, size))
        elif line["what"] == "end" and found:
            found[-1] = LaunchTime(found[-1].started, found[-1].replicas, found[-1].replica_size, line["at"])
    return found
