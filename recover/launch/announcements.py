"""Messages about losses and repairs while the job runs: what the supervisor sees, and what a
survivor records."""

from __future__ import annotations

from pathlib import Path

from recover.launch.verdict import Verdict
from recover.runs.records.feed import RunFeed
from recover.runs.records.rank_ends import name_ranks
from recover.runs.records.sentences import sentence


class Announcer:
    """Announces losses and repairs of jobs that record their steps, each of them once."""

    def __init__(self, run_dir: Path) -> None:
        self._feed = RunFeed(run_dir, new_only=True)
        # microbatches of the first step; later steps have as many, unless the policy lets the batch
        # shrink
        self._batch = 0
        self._alive: set[int] = set()

    def losses(self, verdict: Verdict, alive: set[int]) -> list[str]:
        """Messages about the ranks that were alive at the last look and are not now: how they ended."""
        gone, self._alive = self._alive - alive, alive
        ways: dict[str, list[int]] = {}
        for rank in sorted(gone & set(verdict.lost)):
            ways.setdefault(verdict.lost[rank], []).append(rank)
        left = gone.intersection(verdict.left_on_notice)
        told = [f"{name_ranks(left)} left on notice"] if left else []
        return [*told, *(f"lost {name_ranks(ranks)}: {how}" for how, ranks in ways.items())]

    def repairs(self, at_end: bool = False) -> list[str]:
        """Repairs since the last look, each with the step that it was committed in."""
        texts = []
        for line, incidents in self._feed.read().steps:
            self._batch = self._batch or line.get("microbatches", 0)
            texts += [sentence(incident, line, self._batch) for incident in incidents]
        if at_end:
            texts += [sentence(incident, None, self._batch) for incident in self._feed.pending]
        return texts
