"""ReCoVer in virtual time; also the base of other systems that continue without lost replicas.

Between two events only the number of steps that fit is computed. A step with a loss runs as
docs/explanation/protocol.md says: survivors finish their share, repair, run what the policy deals them, reduce and
commit.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from recover_lab.simulate.account import TimeSpent
from recover_lab.simulate.failures import Fleet, NodeFailure, hits
from recover_lab.simulate.plan_cache import Losses, PlanCache
from recover_lab.simulate.scenario import Scenario
from recover_lab.simulate.scenario_keys import DAY
from recover_lab.simulate.slow_nodes import slowness_of


class ElasticRun:
    """One run of ReCoVer, from one seed."""

    def __init__(self, scenario: Scenario, shares: PlanCache, seed: int, returning: bool) -> None:
        self.scenario, self.shares, self.returning = scenario, shares, returning
        self.horizon = scenario.run.days * DAY
        self.account = TimeSpent(self.horizon)
        self.fleet = Fleet(scenario, seed)
        self.per_unit, self.in_unit = scenario.unit_nodes, scenario.unit_replicas
        self.microbatch, self.vote = scenario.microbatch, scenario.recovery.vote_s
        saving = scenario.recovery.checkpoint_every_s
        self.stretch = (saving + scenario.checkpoint.save_s) / saving
        self.full = self.units = scenario.cluster.nodes // self.per_unit
        self.fleet.free -= scenario.cluster.nodes
        self.replicas = scenario.replicas
        self.start_s, self.stall = scenario.joining.start_s, scenario.joining.stall_s + scenario.transfer
        self.detect_s, self.lease_s = scenario.recovery.detect_s, scenario.recovery.lease_s
        self.repair_s = [scenario.repairing(left) for left in range(self.replicas + 1)]
        self.floor = self.lowest()
        self.warming = self.warm = self.asking = self.forgotten = 0
        slowness = slowness_of(scenario, paced=shares.policy == "paced")
        self.slow, self.pause_ends = slowness.calm, 0.0
        self.repairing = self.ready_before = 0.0  # of the step under repair
        self._ready: list[float] = []  # times at which starting replicas are ready
        self._spells = slowness.spells(scenario, seed, self.horizon)[::-1]
        self._durations: dict[tuple[int, float], float] = {}
        self._calm: dict[tuple[int, float], int] = {}  # undisturbed steps, by replicas and slowness
        self.begin(0.0)

    # A step.

    def duration(self, replicas: int, slow: float = 1.0) -> float:
        key = (replicas, slow)
        if key not in self._durations:
            computing = self.shares.plan(replicas).accum * self.microbatch
            whole = computing + self.scenario.reduce(replicas) + self.scenario.job.overhead_s + self.vote
            self._durations[key] = whole * self.stretch * slow
        return self._durations[key]

    def begin(self, at: float) -> None:
        """Begin a step with the replicas that are in the job."""
        self.began, self.at_start, self.slow_then = at, self.replicas, self.slow
        self.losses: Losses = ()
        self.trail: list[tuple[str, float]] = []  # parts that losses have added to the step
        self.end = at + self.duration(self.replicas, self.slow)

    def advance(self, now: float) -> None:
        """Commit the steps that have ended until now."""
        if now < self.end:
            return
        self._commit()
        self.boundary(self.end)
        if now >= self.end:
            lasts = self.end - self.began
            steps = int((now - self.began) / lasts)
            key = (self.replicas, self.slow)
            self._calm[key] = self._calm.get(key, 0) + steps
            self.account.living += steps * lasts * self.replicas
            self.began += steps * lasts
            self.end = self.began + lasts

    def _commit(self) -> None:
        key = (self.at_start, self.slow_then)
        self._calm[key] = self._calm.get(key, 0) + 1
        self.account.living += (self.end - self.began) * self.replicas
        if self.losses:
            dealt = self.shares.plan(self.at_start).committed
            committed = self.shares.standing(self.at_start, self.losses).committed
            self.account.commit(committed, 1)
            self.account.commit(dealt, -1)  # all steps are counted at the end, as they were dealt
            for part, seconds in self.trail:
                self.account.parts[part] += seconds

    def boundary(self, now: float) -> None:
        """Act between two steps: replicas join, or the whole job restarts."""
        admitted = min(self.asking, self.full - self.units)
        if admitted:
            self.asking -= admitted
            self.units += admitted
            self.replicas += admitted * self.in_unit
            self.account.joined += admitted * self.in_unit
            self.account.parts["joining"] += self.stall
            self.account.living += self.stall * self.replicas
            now += self.stall
        if self.replicas < self.floor and self._whole() > self.units:
            self.restart(now, self.scenario.checkpoint.save_s)
        else:
            self.begin(now)

    # The loop.

    def run(self) -> TimeSpent:
        fleet = self.fleet
        self.manage(0.0)
        while True:
            failure, repair = fleet.next_failure(), fleet.next_repair()
            warm = self._ready[0] if self._ready else math.inf
            spell = self._spells[-1][0] if self._spells else math.inf
            due = min(failure, repair, warm, spell)
            if due >= self.horizon:
                break
            # Steps are committed up to the event before the event changes anything: a boundary that is evaluated late
            # would see nodes that were repaired after it.
            self.advance(due)
            if due == repair:
                fleet.return_repaired(due)
            elif due == failure:
                self._struck(due, fleet.strike(due))
            elif due == warm:
                heappop(self._ready)
                self._is_warm()
            else:
                _, self.slow = self._spells.pop()
            if self.returning:
                self.manage(due)
        self.advance(self.horizon)
        self._close()
        return self.account

    # Losses.

    def _struck(self, now: float, failure: NodeFailure) -> None:
        fleet = self.fleet
        self.account.failures += 1
        inside, healthy = self.units * self.per_unit, fleet.healthy
        lost = hits(failure, inside, healthy)
        units = min(-(-lost // self.per_unit), self.units)
        if units:
            self.units -= units
            fleet.free += units * self.per_unit
        else:
            self._idle_lost(failure)
        fleet.lose(now, failure.nodes, failure)
        if units:
            self.account.struck += 1
            chance = failure.chance * healthy / inside if failure.nodes == 1 else failure.chance
            number = units * self.in_unit
            if now < self.pause_ends:  # during a restart
                self._struck_in_restart(now)
            elif number >= self.replicas:
                self.all_lost(now)
            else:
                self.replicas_lost(now, number, min(chance, 1 - 1e-9), failure)

    def _struck_in_restart(self, now: float) -> None:
        if self.scenario.restart.struck == "again":
            self.account.take_back(self.pause_ends - now, "restart", "waiting", "checkpoint")
            self.restart(now)
        else:
            ends, self.account.restarts = self.pause_ends, self.account.restarts - 1
            self.restart(now)
            self.account.take_back(self.pause_ends - now, "restart", "waiting")
            self.pause_ends = ends
            self.begin(ends)

    def _idle_lost(self, failure: NodeFailure) -> None:
        """Handle the loss of a node outside the job: that of a ready or starting replica, or a free one."""
        place = failure.chance * self.fleet.healthy - self.units * self.per_unit
        if place < (self.warm + self.asking) * self.per_unit:
            if self.warm:
                self.warm -= 1
            else:
                self.asking -= 1
        elif place < (self.warm + self.asking + self.warming) * self.per_unit:
            self.warming -= 1
            self.forgotten += 1
        else:
            return
        self.fleet.free += self.per_unit

    def replicas_lost(self, now: float, number: int, chance: float, failure: NodeFailure) -> None:
        """Handle the loss of replicas in the current step."""
        noticed = now + (self.lease_s if failure.silent else self.detect_s)
        if not self.losses:
            computing = self.shares.plan(self.at_start).accum * self.microbatch
            self.ready = self.began + computing * self.stretch * self.slow_then
            self.tail = self.end - self.ready
            self.repaired = -math.inf
        elif now < self.repaired:  # during the repair of another loss: one repair for both
            number += len(self.losses[-1])
            self.replicas += len(self.losses[-1])
            self.losses = self.losses[:-1]
            del self.trail[-3:]
            self.ready, noticed = self.ready_before, max(self.repairing, noticed)
        self.losses = (*self.losses, self.shares.victims(self.at_start, self.losses, chance, number))
        response = self.shares.standing(self.at_start, self.losses)
        self.replicas = response.survivors
        self.repairing = max(self.ready, noticed)
        self.repaired = self.repairing + self.repair_s[self.replicas]
        redo = response.rounds * self.microbatch * self.slow_then
        self.trail += [
            ("detect", self.repairing - self.ready),
            ("repair", self.repaired - self.repairing),
            ("redo", redo),
        ]
        self.ready_before, self.ready = self.ready, self.repaired + redo
        self.end = self.ready + self.tail

    def all_lost(self, now: float) -> None:
        """Return to the last checkpoint, half an interval ago in the mean; the current step is lost, too."""
        lost = min(self.scenario.recovery.checkpoint_every_s / 2, self.began)
        self.account.parts["rework"] += lost + now - self.began
        self.account.parts["productive"] -= lost
        self.restart(now)

    # Rejoins and restarts.

    def lowest(self) -> float:
        """The number of replicas below which the whole job restarts; 0 where replicas rejoin."""
        given = self.scenario.recovery.restart_at
        if self.returning or given == 0:
            return 0
        return best_floor(self.scenario, self.shares) if given is None else given * self.replicas

    def _whole(self) -> int:
        """Placement units of replicas for which there are healthy nodes."""
        return min(self.full, self.fleet.healthy // self.per_unit)

    def restart(self, now: float, save: float = 0.0) -> None:
        """Restart on all healthy nodes. With `save` the restart is planned: no work is lost."""
        fleet, parts, cost = self.fleet, self.account.parts, self.scenario.restart
        seconds = cost.planned if save else cost.seconds
        self.account.restarts += 1
        fleet.free += (self.units + self.warm + self.warming + self.asking) * self.per_unit
        self.forgotten += self.warming
        self.warm = self.warming = self.asking = 0
        begun = now
        while not self._whole():
            now = fleet.next_repair()
            fleet.return_repaired(now)
        self.units = self._whole()
        fleet.free -= self.units * self.per_unit
        self.replicas = self.units * self.in_unit
        parts["waiting"] += now - begun
        parts["checkpoint"] += save
        parts["restart"] += seconds
        self.pause_ends = now + save + seconds
        self.account.living += (self.pause_ends - now) * self.replicas
        self.begin(self.pause_ends)

    def _is_warm(self) -> None:
        if self.forgotten:
            self.forgotten -= 1
        else:
            self.warming -= 1
            self.warm += 1

    def manage(self, now: float) -> None:
        """Replicas that are ready ask to join; free nodes start a new replica."""
        if not self.returning:
            return
        while self.warm and self.units + self.asking < self.full:
            self.warm -= 1
            self.asking += 1
        wanted = self.full + self.scenario.joining.standby
        coming = self.units + self.asking + self.warming + self.warm
        while self.fleet.free >= self.per_unit and coming < wanted:
            self.fleet.free -= self.per_unit
            self.warming += 1
            coming += 1
            heappush(self._ready, now + self.start_s)

    # Accounting.

    def _close(self) -> None:
        """Account for the time of all steps, and of the unfinished last one."""
        for (replicas, slow), steps in self._calm.items():
            self.account.commit(self.shares.plan(replicas).committed, steps)
            self.spend(replicas, slow, steps)
        if self.horizon >= self.began:
            fraction = (self.horizon - self.began) / (self.end - self.began)
            for part, seconds in self.trail:
                self.account.parts[part] += seconds * fraction
            self.spend(self.at_start, self.slow_then, fraction)
        else:
            self.cut(self.began - self.horizon)

    def cut(self, over: float) -> None:
        """Correct a pause that was booked as a whole and is cut by the end of the run."""
        self.account.take_back(over, "restart", "joining", "waiting", "checkpoint")

    def spend(self, replicas: int, slow: float, steps: float) -> None:
        parts, plan, whole = self.account.parts, self.shares.plan(replicas), self.scenario.full_step
        took = self.duration(replicas, slow)
        undelayed = took / slow
        plain = undelayed / self.stretch - self.vote
        useful = whole * plan.committed / self.shares.global_batch
        # A batch that shrinks with the replicas takes the same time; the full batch takes longer.
        by_right = (
            plain if plan.committed < self.shares.global_batch else whole * self.scenario.replicas / replicas
        )
        parts["productive"] += steps * useful
        parts["missing"] += steps * (by_right - useful)
        parts["uneven"] += steps * (plain - by_right)
        parts["vote"] += steps * self.vote
        parts["checkpoint"] += steps * (undelayed - plain - self.vote)
        parts["stragglers"] += steps * (took - undelayed)


def best_floor(scenario: Scenario, shares: PlanCache) -> int:
    """Number of replicas below which a job without rejoins should restart, to maximise work per hour.

    The work is counted from one restart to the next, while the job loses one placement unit after the other. Costs of
    recoveries are left out, and nodes are assumed to be repaired by then.
    """
    full, step = scenario.replicas, scenario.unit_replicas
    pause = scenario.restart.planned + scenario.checkpoint.save_s
    time = work = best = 0.0
    found = 0
    whole = scenario.microbatch * shares.plan(full).accum + scenario.reduce(full)
    for replicas in range(full, 0, -step):
        dwell = scenario.between_failures * full / replicas
        speed = whole / (scenario.microbatch * shares.plan(replicas).accum + scenario.reduce(replicas))
        time, work = time + dwell, work + dwell * speed
        value = work / (time + pause)
        if value > best:
            best, found = value, replicas
        elif speed < best:  # from here on every hour is below the mean
            break
    return found
