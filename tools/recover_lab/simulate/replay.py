"""Replays a schedule of deaths in the simulation, to compare it with a recorded run under the same schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recover.faults.fault import LETHAL, Fault
from recover.faults.locations import AFTER_VERDICT
from recover.runs.records.json_lines import read
from recover_lab.simulate.elastic import ElasticRun
from recover_lab.simulate.failures import NodeFailure
from recover_lab.simulate.plan_cache import PlanCache
from recover_lab.simulate.scenario import Scenario

_DEATH = NodeFailure(0.0, 0.0, 1, True, False, 0.0)
_A_MOMENT = 1e-6
_IN_REDUCTION = ("bucket", "in-reduce", "in-totals")  # nearly all microbatches are computed by then


@dataclass(frozen=True)
class ReplayedRun:
    seconds: tuple[float, ...]  # of each step
    incidents: dict[int, float]  # by step: seconds from the repair until the gradients are complete
    microbatches: tuple[int, ...]


class _ScheduledRun(ElasticRun):
    """A run whose only failures are the scheduled deaths."""

    def __init__(self, scenario: Scenario) -> None:
        shares = PlanCache(scenario.job.policy, scenario.replicas, scenario.global_batch)
        super().__init__(scenario, shares, seed=0, returning=False)
        self.stretch, self.floor = 1.0, 0.0
        self.numbers = list(range(self.replicas))  # of the living
        self._durations.clear()
        self.begin(0.0)

    def die(self, fault: Fault) -> None:
        place = self.numbers.index(fault.replica)
        self.numbers.remove(fault.replica)
        chance = (place + 0.5) / (len(self.numbers) + 1)
        self.replicas_lost(self._moment(fault), 1, chance, _DEATH)

    def die_complete(self, fault: Fault) -> None:
        """Death in the vote: all survivors have the complete sum, and commit it."""
        self.numbers.remove(fault.replica)
        seconds = self.scenario.repairing(self.replicas - 1)
        self.trail.append(("repair", seconds))
        self.end += seconds
        self.replicas -= 1

    def _moment(self, fault: Fault) -> float:
        if self.losses:
            return (self.repaired if fault.location == "extra" else self.repairing) + _A_MOMENT
        computed = self.shares.plan(self.at_start).accum * self.microbatch
        late = fault.location in (*_IN_REDUCTION, "vote")
        return self.began + (computed if late else 0.0) + _A_MOMENT


def replay(scenario: Scenario, faults: Sequence[Fault], steps: int) -> ReplayedRun:
    """Replay steps under these faults; only faults that cost a replica count."""
    lethal = [fault for fault in faults if fault.action in LETHAL and fault.action != "corrupt:weights"]
    of_step: dict[int, list[Fault]] = {}
    for fault in lethal:
        of_step.setdefault(fault.step + (fault.location in AFTER_VERDICT), []).append(fault)
    run = _ScheduledRun(scenario)
    seconds, incidents, microbatches = [], {}, []
    for step in range(1, steps + 1):
        struck = of_step.get(step, [])
        if len(struck) == 1 and struck[0].location == "vote":
            run.die_complete(struck[0])
        else:
            for fault in sorted(struck, key=lambda fault: fault.location in ("repair", "extra")):
                run.die(fault)
        if struck:
            incidents[step] = sum(spent for part, spent in run.trail if part != "detect")
        seconds.append(run.end - run.began)
        microbatches.append(run.shares.standing(run.at_start, run.losses).committed)
        run.advance(run.end)
    return ReplayedRun(tuple(seconds), incidents, tuple(microbatches))


@dataclass(frozen=True)
class ReplayComparison:
    """A replayed run against the recorded one; differences are relative to the recorded one."""

    seconds: float  # recorded, of all steps but the first
    total: float
    tokens: float
    incidents: dict[int, tuple[float, float, float]]  # by step: recorded, replayed, difference
    microbatches: tuple[set[int], set[int]]  # of committed steps: recorded, replayed


def compare_with_run(scenario: Scenario, faults: Sequence[Fault], run: Path) -> ReplayComparison:
    """Replay the schedule of a run and compare. The first step, which warms up, is left out on both sides."""
    steps = read(run / "steps.jsonl").whole
    recorded = {line["step"]: line for line in read(run / "incidents.jsonl").whole if line["dead_replicas"]}
    played = replay(scenario, faults, len(steps))
    real, mine = sum(line["seconds"] for line in steps[1:]), sum(played.seconds[1:])
    tokens = sum(line["tokens"] for line in steps)
    my_tokens = sum(played.microbatches) * scenario.job.tokens
    incidents = {}
    for step, line in recorded.items():
        took = (line["repair_ms"] + line["restore_ms"] + line["redo_ms"]) / 1e3
        said = played.incidents.get(step, 0.0)
        incidents[step] = (took, said, said / took - 1)
    return ReplayComparison(
        real,
        mine / real - 1,
        my_tokens / tokens - 1,
        incidents,
        ({line["microbatches"] for line in steps}, set(played.microbatches)),
    )
