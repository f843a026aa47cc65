"""The time of one simulated run in its parts, which add up to the length of the run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from recover_lab.simulate.scenario import Scenario
from recover_lab.simulate.scenario_keys import DAY

# In the order of pictures: costs of a failure at once, costs afterwards, costs without failures.
PARTS = {
    "productive": "preserved work",
    "detect": "noticing the loss",
    "repair": "repairing the world",
    "redo": "lost microbatches again",
    "discarded": "steps thrown away",
    "rework": "steps since the checkpoint, again",
    "restart": "restarting",
    "joining": "waiting for joiners",
    "missing": "replicas that are gone",
    "uneven": "uneven shares",
    "redundant": "work done twice",
    "vote": "votes of every step",
    "waiting": "waiting for nodes",
    "checkpoint": "writing checkpoints",
    "stragglers": "waiting for slow nodes",
    "spares": "nodes standing by",
}


@dataclass
class TimeSpent:
    seconds: float  # the length of the run
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds
    steps: int = 0
    microbatches: int = 0
    smallest: int = 0  # fewest microbatches in a step; 0 before the first step
    failures: int = 0  # of nodes, racks and switches, inside the job or not
    struck: int = 0  # failures that cost the job something
    joined: int = 0  # replicas that rejoined
    restarts: int = 0  # of the whole job
    living: float = 0.0  # replica-seconds of living replicas

    def commit(self, microbatches: int, steps: int = 1) -> None:
        if steps:
            self.steps += steps
            self.microbatches += microbatches * steps
            self.smallest = min(self.smallest or microbatches, microbatches)

    def take_back(self, seconds: float, *parts: str) -> None:
        """Take back the rest of a pause that was booked as a whole and ended early, from these parts in turn."""
        for part in parts:
            if seconds <= 0.0:
                return  # the usual case
            less = min(seconds, max(self.parts[part], 0.0))
            self.parts[part] -= less
            seconds -= less

    def goodput(self, scenario: Scenario) -> float:
        """Preserved work over all GPU time that was paid for; 1 without failures and checkpoints."""
        paid = scenario.cluster.nodes / (scenario.cluster.nodes + scenario.cluster.spares)
        return self.parts["productive"] / self.seconds * paid

    def shares(self, scenario: Scenario) -> dict[str, float]:
        """Shares of all GPU time, which add up to 1."""
        paid = scenario.cluster.nodes / (scenario.cluster.nodes + scenario.cluster.spares)
        found = {part: self.parts.get(part, 0.0) / self.seconds * paid for part in PARTS}
        found["spares"] = 1 - paid
        return found

    def tokens_per_day(self, scenario: Scenario) -> float:
        per_step = scenario.global_batch * scenario.job.tokens
        return self.parts["productive"] / scenario.full_step * per_step / self.seconds * DAY
