"""Messages about losses and repairs while the job runs: what the supervisor sees, and what a
survivor records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recover.launch.verdict import Verdict, name_ranks
from recover.runs.records.json_lines import read
from recover.runs.records.sentences import sentence
from recover.runs.records.tail import Follower


class Announcer:
    """For jobs that record their steps. Each loss and each repair is announced once."""

    def __init__(self, run_dir: Path) -> None:
        self._steps = Follower(run_dir / "steps.jsonl")
        self._incidents = Follower(run_dir / "incidents.jsonl")
        self._earlier = {json.dumps(line) for line in read(run_dir / "incidents.jsonl").whole}
        self._pending: list[Any] = []  # incidents whose step is not recorded yet
        self._batch = 0  # microbatches of the first step: those of each, unless the policy lets it shrink
        self._alive: set[int] = set()

    def losses(self, verdict: Verdict, alive: set[int]) -> list[str]:
        """The ranks that were alive at the last look and are not now, and how they ended."""
        gone, self._alive = self._alive - alive, alive
        ways: dict[str, list[int]] = {}
        for rank in sorted(gone & set(verdict.lost)):
            ways.setdefault(verdict.lost[rank], []).append(rank)
        return [f"lost {name_ranks(ranks)}: {how}" for how, ranks in ways.items()]

    def repairs(self, at_end: bool = False) -> list[str]:
        """The repairs since the last call, each with the step that was committed after it."""
        # An incident is written before its step. Read in the other order, no incident of a known
        # step can be missing.
        steps = {line["step"]: line for line in self._steps.read()}
        if steps and not self._batch:
            self._batch = steps[min(steps)]["microbatches"]
        self._pending += [line for line in self._incidents.read() if json.dumps(line) not in self._earlier]
        found = []
        for incident in list(self._pending):
            step = steps.get(incident["step"])
            if step is not None or at_end:
                self._pending.remove(incident)
                found.append(sentence(incident, step, self._batch))
        return found
