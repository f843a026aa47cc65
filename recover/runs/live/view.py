"""The state of a run, kept up to date from its records, for the page, `recover status` and the metrics."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import yaml

from recover.runs.live.ranks import GONE, LEFT, ranks_now
from recover.runs.records.curve_table import POINTS, CurveTable
from recover.runs.records.curves import curves
from recover.runs.records.feed import RunFeed
from recover.runs.records.goodput import TimeAccount
from recover.runs.records.incident_times import PHASES, pause
from recover.runs.records.job_log import ADDRESS, PLACEMENT, job_files, job_lines, launches
from recover.runs.records.job_state import RUNNING, JobState, job_state
from recover.runs.records.kinds import Line
from recover.runs.records.launch_history import LaunchHistory, losses_in_words
from recover.runs.records.root_causes import Story, stories

# Names of the metrics of verified gradients and sums, and the fields of a step's record that they count.
VERIFICATION = {
    "verified_slots": "verified",
    "unverified_slots": "unverified",
    "corrupt_gradients": "corrupt",
    "wrong_sums": "wrong_sums",
}
_WITHOUT_LOSS = ("joined_replicas", "left_replicas", "wrong_sums")  # of incidents that are shown as well
_RECENT = 32  # last steps, from whose speed the remaining time is estimated
_FRESH = 0.1  # seconds in which a second refresh reads nothing
_PAST = 60.0  # seconds, by the clock of the run, after which a lost rank is only counted


class RunView:
    """One run. `refresh` reads what is new; the other methods report it. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.name = run_dir, run_dir.resolve().name
        self._lock = threading.RLock()
        self._looked = 0.0
        self._mappings: dict[str, tuple[tuple[int, ...], Line]] = {}
        self._stories: tuple[tuple[int, ...], list[Story]] = ((), [])
        # Changes whenever earlier answers no longer hold, also if this process is restarted.
        self.generation = int(time.time())
        self._forget()

    def _forget(self) -> None:
        self.generation += 1
        self._feed = RunFeed(self.run_dir)
        self._curves, self._history = CurveTable(), LaunchHistory()
        self._incidents: list[Line] = []
        self._job: list[Line] = []
        self._job_size = -1
        self._last: Line = {}
        self._values: dict[str, float] = {}
        self._stragglers: dict[str, dict[str, Any]] = {}
        self._reruns = self._skipped = 0
        self._verification: Counter[str] = Counter()
        self._first_batch: int | None = None  # microbatches of the first step
        self._batches: dict[int, int] = {}  # microbatches of the steps with incidents
        self._tokens = 0
        self._has_tokens = False  # scripts of the user's record none
        # Tokens, microbatches and seconds of the last few steps.
        self._spans: deque[tuple[float, float, float]] = deque(maxlen=_RECENT)
        self._account = TimeAccount()

    @property
    def count(self) -> int:
        """Number of committed steps that have been read."""
        return self._curves.count

    def refresh(self, at_once: bool = False) -> None:
        """Read what is new. Calls in quick succession read once, unless `at_once`."""
        with self._lock:
            if time.monotonic() - self._looked < _FRESH and not at_once:
                return
            self._looked = time.monotonic()
            if not self._read():  # rolled back or started again: read it from the beginning
                self._forget()
                self._read()

    def _read(self) -> bool:
        """Returns False if the run was rolled back or started again, and must be read from its beginning."""
        size = sum(path.stat().st_size for path in job_files(self.run_dir) if path.exists())
        if size != self._job_size:
            before, self._job, self._job_size = launches(self._job), job_lines(self.run_dir), size
            after = launches(self._job)
            if self.count and [one.started for one in before] != [one.started for one in after]:
                return False
            self._account.launches = self._history.launches = after
        update = self._feed.read()
        if update.restarted:
            return False
        self._incidents += update.incidents
        if update.steps:
            self._account.replicas = self.config.get("replicas") or 0
        for line, incidents in update.steps:
            self._add(line, incidents)
        return True

    def _add(self, line: Line, incidents: list[Line]) -> None:
        self._curves.add(line)
        self._history.add(line)
        self._account.add(line, incidents)
        self._values |= curves(line)
        self._last = line
        self._tokens += line.get("tokens", 0)
        self._has_tokens = self._has_tokens or "tokens" in line
        self._reruns += line.get("reruns", 0)
        self._skipped += bool(line.get("skipped"))
        for name, key in VERIFICATION.items():
            self._verification[name] += line.get(key, 0)
        self._spans.append((line.get("tokens", 0), line.get("microbatches", 0), line.get("seconds", 0.0)))
        if self._first_batch is None:
            self._first_batch = line.get("microbatches")
        if incidents:
            self._batches[line["step"]] = line.get("microbatches", 0)
        for replica, factor in (line.get("stragglers") or {}).items():
            seen = self._stragglers.setdefault(replica, {"first": line["step"], "factor": 0.0})
            seen["factor"], seen["last"] = max(seen["factor"], factor), line["step"]

    @property
    def config(self) -> Line:
        return self._mapping("config.yaml")

    @property
    def summary(self) -> Line:
        return self._mapping("summary.json")

    def _mapping(self, name: str) -> Line:
        """The content of a YAML or JSON file, read again only if it has changed."""
        path = self.run_dir / name
        try:
            found = path.stat()
        except OSError:
            return {}
        state = (found.st_ino, found.st_mtime_ns, found.st_size)
        if name not in self._mappings or self._mappings[name][0] != state:
            self._mappings[name] = (state, _mapping(path))
        return self._mappings[name][1]

    def state(self) -> dict[str, Any]:
        """The state of the run, in numbers."""
        with self._lock:
            config, start, job = self.config, self._start(), self.job()
            size = int(start.get("replica_size", 1))
            parts = self._history.parts(self._incidents, config.get("replicas") or 0)
            return {
                "name": self.name,
                **self._progress(),
                "global_batch": config.get("global_batch") or self._first_batch,
                "microbatches": self._last.get("microbatches"),
                "loss": self._last.get("loss"),
                "values": self._values,
                "tokens": self._tokens if self._has_tokens else None,
                "replicas": self._last.get("replicas"),
                "replicas_end": (0 if job.none_left else self._last.get("replicas")) if job.is_over else None,
                "replicas_start": start.get("ranks", 0) // size or config.get("replicas"),
                "replica_size": size,
                "hosts": sorted(
                    {line["host"] for line in self._job if line.get("host")}
                    | (self._placement().get("hosts") or {}).keys()
                ),
                "epoch": self._last.get("epoch"),
                "goodput": self._account.report((self.summary.get("goodput") or {}).get("until")),
                "incidents": len(self.stories()),
                "lost": sum(part.lost for part in parts),
                "left": sum(part.left for part in parts),
                "history": losses_in_words(parts),
                "resumed": [{"step": part.first, "replicas": part.replicas} for part in parts[1:]],
                "stragglers": self._stragglers,
                "joining": {} if job.is_over else self._last.get("joining") or {},
                "reruns": self._reruns,
                "skipped": self._skipped,
                "verification": self._verified(),
                "started": start.get("at"),
                "updated": self._last.get("at"),
                "unreadable": self._feed.unreadable,
            }

    def _verified(self) -> dict[str, int] | None:
        """Numbers of verified gradients; None if the run verifies none."""
        if not self._verification.total() and not self.config.get("verify"):
            return None
        return {name: self._verification[name] for name in VERIFICATION}

    def job(self) -> JobState:
        """Whether the job runs, and how it ended."""
        with self._lock:
            return job_state(self.run_dir, self._job, self.summary, self._last, self.config.get("steps"))

    def page(self) -> str:
        """The address of the page that the job serves, or served; "" if there is none."""
        try:
            return (self.run_dir / ADDRESS).read_text().strip()
        except OSError:
            return ""

    def _progress(self) -> dict[str, Any]:
        """Whether the job runs, its step, and its speed over the last steps."""
        job, planned = self.job(), self.config.get("steps")
        tokens, microbatches, seconds = (sum(span[of] for span in self._spans) for of in range(3))
        step = int(self._last.get("step", 0))
        left = (
            (planned - step) * seconds / max(1, len(self._spans)) if planned and job.name == RUNNING else None
        )
        return {
            "state": job.name,
            "how": job.text,
            "step": step,
            "steps": planned,
            "tokens_per_second": round(tokens / seconds, 1) if seconds and self._has_tokens else None,
            "microbatches_per_second": round(microbatches / seconds, 3) if seconds else None,
            "eta_seconds": None if left is None else round(left, 1),
        }

    def series(self, points: int = POINTS) -> dict[str, Any]:
        """The curves, with at most `points` points."""
        with self._lock:
            return self._curves.series(points)

    def since(self, count: int) -> list[list[float | None]]:
        """The steps after the first `count` ones, as rows of the columns."""
        with self._lock:
            return self._curves.rows(count)

    def heldout(self) -> dict[str, list[float | None]]:
        """The held-out loss, by the step after which it was evaluated."""
        with self._lock:
            self._curves.add_heldout(self.summary)  # evaluated after the last step
            return self._curves.heldout()

    def stories(self) -> list[Story]:
        with self._lock:
            state = (self.generation, len(self._incidents), self._job_size)
            if self._stories[0] != state:
                self._stories = (state, stories(self._incidents, self._job))
            return self._stories[1]

    def incidents(self) -> list[dict[str, Any]]:
        """Every loss with its root cause, its timeline and the microbatches that its step was committed with; and
        every join, every leave on notice, and every wrong sum."""
        with self._lock:
            told = {story.number: story for story in self.stories()}
            came = {
                number: Story(number, incident)
                for number, incident in enumerate(self._incidents, 1)
                if any(incident.get(what) for what in _WITHOUT_LOSS) and number not in told
            }
            return [self._incident(story) for _, story in sorted((told | came).items())]

    def _incident(self, story: Story) -> dict[str, Any]:
        record = story.incident or {}
        joined = record.get("joined_replicas") or []
        return {
            "number": story.number,
            "step": record.get("step"),
            "epoch": record.get("epoch"),
            "at": record.get("at") or (story.deaths[0].at if story.deaths else None),
            "location": record.get("location", ""),
            "dead_ranks": [death.rank for death in story.deaths],
            "dead_replicas": sorted({death.replica for death in story.deaths}),
            "joined_replicas": joined,
            "left_replicas": record.get("left_replicas") or [],
            "wrong_sums": record.get("wrong_sums") or [],
            "cause": story.short,
            "first": [death.facts() for death in story.first],
            "followed": [death.facts() for death in story.deaths if death.because_of is not None],
            "phases": {} if joined else {phase: record.get(f"{phase}_ms") or 0.0 for phase in PHASES},
            "pause_ms": pause(record),
            "transfer_ms": record.get("transfer_ms") or 0.0,
            "redone": record.get("redone_microbatches", 0),
            "extra": record.get("extra_microbatches", 0),
            "committed": self._batches.get(record.get("step", 0)),
        }

    def ranks(self) -> list[dict[str, Any]]:
        """The activity of each rank: from the board of a job on this host, or from the records."""
        with self._lock:
            since = self._start().get("at", 0.0)
            gone = {
                death.rank: death
                for story in self.stories()
                for death in story.deaths
                if story.incident is None or story.incident.get("at", 0.0) >= since
            }
            joined, left = (
                {
                    rank
                    for incident in self._incidents
                    if incident.get("at", since) >= since
                    for rank in incident.get(which) or ()
                }
                for which in ("joined_ranks", "left_ranks")
            )
            seats = self._placement().get("ranks") or {}
            found = ranks_now(
                self._start(), self._job, gone, joined, self._last, seats, self.job().is_over, left
            )
            now = self._last.get("at") or 0.0
            for entry in found:
                # Replicas that join have new numbers, so lost ranks would fill the grid in time.
                entry["past"] = entry["doing"] in (GONE, LEFT) and now - (entry["since"] or now) > _PAST
            return found

    def log(self, rank: int, limit: int = 64 * 1024) -> str | None:
        """The end of a rank's log; None if there is none, or if it is outside the run directory."""
        path = self.run_dir / "ranks" / f"{rank}.log"
        try:
            if not path.resolve(strict=True).is_relative_to(self.run_dir.resolve()):
                return None  # a link that leads out of the run
            with open(path, "rb") as file:
                file.seek(0, 2)
                size = file.tell()
                file.seek(max(0, size - limit))
                text = file.read().decode(errors="replace")
        except (OSError, RuntimeError):
            return None
        return text if size <= limit else text.partition("\n")[2]

    def _start(self) -> Line:
        return next((line for line in reversed(self._job) if line["what"] == "start"), {})

    def _placement(self) -> Line:
        """The placement of a job on several hosts. (The file may be left over from an earlier job.)"""
        return self._mapping(PLACEMENT) if "run" in self._start() else {}


def _mapping(path: Path) -> Line:
    """The content of a YAML or JSON file; empty if it cannot be read."""
    try:
        text = path.read_bytes()
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}
