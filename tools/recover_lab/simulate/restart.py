"""Checkpoint-restart in virtual time, from disk and from memory; and replicated shards, which delay a restart."""

from __future__ import annotations

import math

from recover_lab.simulate.account import TimeSpent
from recover_lab.simulate.closed_forms import best_interval, endured
from recover_lab.simulate.failures import Fleet, NodeFailure, hits
from recover_lab.simulate.plan_cache import PlanCache
from recover_lab.simulate.scenario import Scenario
from recover_lab.simulate.scenario_keys import DAY
from recover_lab.simulate.slow_nodes import slowness_of


class RestartRun:
    """One run of checkpoint-restart, from one seed. `every`: seconds between checkpoints."""

    def __init__(
        self, scenario: Scenario, shares: PlanCache, seed: int, every: float, memory: bool = False
    ) -> None:
        self.scenario, self.shares, self.memory = scenario, shares, memory
        self.horizon = scenario.run.days * DAY
        self.account = TimeSpent(self.horizon)
        self.fleet = Fleet(scenario, seed)
        self.per_unit, self.in_unit = scenario.unit_nodes, scenario.unit_replicas
        self.microbatch = scenario.microbatch
        self.save = scenario.checkpoint.memory_save_s if memory else scenario.checkpoint.save_s
        disk = scenario.recovery.checkpoint_every_s
        # Checkpoints in memory are also written to disk from time to time.
        self.stretch = (disk + scenario.checkpoint.save_s) / disk if memory else 1.0
        self.full = scenario.cluster.nodes // self.per_unit
        self.whole = scenario.full_step
        self.every = every
        slowness = slowness_of(scenario, paced=False)
        self.slow = slowness.calm
        self._plains: dict[int, float] = {}
        self._spells = slowness.spells(scenario, seed, self.horizon)[::-1]
        # Steps run from `resume` on; a restart is complete at `started`.
        self.now = self.resume = self.started = 0.0
        self._reconsider = math.inf  # when to ask again whether a restart with repaired nodes pays
        self._place()

    def run(self) -> TimeSpent:
        fleet = self.fleet
        while True:
            failure, repair = fleet.next_failure(), fleet.next_repair()
            due = min(failure, repair, self._reconsider, self._spells[-1][0] if self._spells else math.inf)
            if due >= self.horizon:
                break
            self._work(due)
            if due == failure:
                self.account.failures += 1
                self._struck(fleet.strike(due))
            elif due == repair:
                fleet.return_repaired(due)
                self._reconsider = max(due, self.resume)
            elif due == self._reconsider:
                self._reconsider = math.inf
                self._grow()
            else:
                _, self.slow = self._spells.pop()
                self._pace("stragglers")
        self._work(self.horizon)
        self._close()
        return self.account

    # Training.

    def _plain(self, replicas: int) -> float:
        """Seconds of an undisturbed step."""
        found = self._plains.get(replicas)
        if found is None:
            computing = self.shares.plan(replicas).accum * self.microbatch
            found = computing + self.scenario.reduce(replicas) + self.scenario.job.overhead_s
            self._plains[replicas] = found
        return found

    def _place(self) -> None:
        """Place whole replicas on healthy nodes, at most as many as at the start."""
        self.fleet.free = self.fleet.healthy
        self.units = min(self.full, self.fleet.free // self.per_unit)
        self.fleet.free -= self.units * self.per_unit
        self.replicas = self.units * self.in_unit
        self.placed()
        self.at = 0.0  # seconds into the segment, at the present speed
        self.shifted: dict[str, float] = {}  # by part: the difference to the seconds that it has taken
        self.step = self.step_seconds()
        self.steps = max(1, round(self.every / self.step))

    def placed(self) -> None:
        """Called after a placement; for systems with copies."""

    def step_seconds(self) -> float:
        return self.step_with(self.replicas)

    def step_with(self, replicas: int) -> float:
        """Seconds of a step right after a restart on so many replicas."""
        return self._plain(replicas) * self.stretch * self.slow

    def _pace(self, part: str) -> None:
        """The speed of steps changes: convert the position in the segment."""
        before, self.step = self.step, self.step_seconds()
        done = min(self.at, self.steps * before)
        place = done * self.step / before + self.at - done
        # Of a slow step only the seconds of an undelayed one belong to `part`: `spend` books the others to stragglers.
        own = (self.at - place) / (1.0 if part == "stragglers" else self.slow)
        for cause, seconds in ((part, own), ("stragglers", self.at - place - own)):
            self.shifted[cause] = self.shifted.get(cause, 0.0) + seconds
        self.at = place

    def _settle(self, share: float = 1.0) -> float:
        """This share of the segment is complete: book its differences to the present speed to the parts that caused
        them. Returns the differences of the rest."""
        for part, seconds in self.shifted.items():
            self.account.parts[part] += seconds * share
        rest = sum(self.shifted.values()) * (1 - share)
        self.shifted.clear()
        return rest

    def _work(self, until: float) -> None:
        began, self.now = max(self.now, self.resume), until
        if until <= began:
            return
        self.account.living += (until - began) * self.replicas
        self.at += until - began
        length = self.steps * self.step + self.save
        segments = int(self.at / length)
        if segments:
            self._settle()
            self.at -= segments * length
            self.account.commit(self.shares.global_batch, segments * self.steps)
            self.spend(segments * self.steps)
            self.account.parts["checkpoint"] += segments * self.save

    def spend(self, steps: float) -> None:
        parts, full = self.account.parts, self.scenario.replicas
        undelayed = self.step / self.slow
        plain = undelayed / self.stretch
        by_right = self.whole * full / self.replicas
        parts["productive"] += steps * self.whole
        parts["missing"] += steps * (by_right - self.whole)
        parts["uneven"] += steps * (plain - by_right)
        parts["checkpoint"] += steps * (undelayed - plain)
        parts["stragglers"] += steps * (self.step - undelayed)

    # Failures.

    def _struck(self, failure: NodeFailure) -> None:
        inside, healthy = self.units * self.per_unit, self.fleet.healthy
        lost = hits(failure, inside, healthy)
        units = min(-(-lost // self.per_unit), self.units)
        self.fleet.free += units * self.per_unit
        self.units -= units
        self.fleet.lose(self.now, failure.nodes, failure)
        if units:
            self.account.struck += 1
            chance = failure.chance * healthy / inside if failure.nodes == 1 else failure.chance
            self.lost(units * self.in_unit, min(chance, 1 - 1e-9), failure)

    def lost(self, number: int, chance: float, failure: NodeFailure) -> None:
        self.restart(failure)

    def restart(self, failure: NodeFailure) -> None:
        parts, now, cost = self.account.parts, self.now, self.scenario.restart
        if now < self.started and cost.struck == "goes-on" and self.fleet.healthy >= self.per_unit:
            return self._place()
        if now < self.started:  # a failure during a restart
            self.account.take_back(self.started - now, "restart", "waiting", "checkpoint")
        else:
            parts["rework"] += self.at + sum(self.shifted.values())
            self.account.take_back(max(0.0, self.resume - now), "repair", "detect")
        from_memory = self.memory and failure.nodes < self.scenario.checkpoint.memory_copies
        if self.memory and not from_memory:
            lost = min(self.scenario.recovery.checkpoint_every_s / 2, now)
            parts["rework"] += lost
            parts["productive"] -= lost
        self.account.restarts += 1
        while self.fleet.healthy < self.per_unit:
            now = self.fleet.next_repair()
            self.fleet.return_repaired(now)
        parts["waiting"] += now - self.now
        self._place()
        seconds = cost.seconds - cost.detect_s
        if from_memory:
            seconds += self.scenario.checkpoint.memory_load_s - cost.load_s
        seconds += max(cost.detect_s, self.scenario.recovery.lease_s if failure.silent else 0.0)
        parts["restart"] += seconds
        self.resume = self.started = now + seconds
        self.account.living += (self.resume - self.now) * self.replicas

    def _grow(self) -> None:
        """Save and restart with repaired nodes, if the time gained until the next failure exceeds the pause."""
        if self.now < self.resume:
            self._reconsider = self.resume
            return
        units = min(self.full, self.fleet.healthy // self.per_unit)
        cost = self.scenario.restart
        seconds = cost.planned
        if self.memory:
            seconds += self.scenario.checkpoint.memory_load_s - cost.load_s
        faster = 1 - self.step_with(units * self.in_unit) / self.step
        if units <= self.units or faster * self.scenario.between_failures <= self.save + seconds:
            return
        parts = self.account.parts
        done = min(self.at, self.steps * self.step)
        steps = int(done / self.step)
        unfinished = done - steps * self.step  # the step under way, at the present speed
        parts["rework"] += unfinished + self._settle(1 - unfinished / done if done else 1.0)
        self.account.commit(self.shares.global_batch, steps)
        self.spend(steps)
        parts["checkpoint"] += self.at - done + self.save
        parts["restart"] += seconds
        self.account.restarts += 1
        self._place()
        self.resume = self.started = self.now + self.save + seconds
        self.account.living += (self.resume - self.now) * self.replicas

    def _close(self) -> None:
        over = max(0.0, self.resume - self.horizon)
        if self.horizon < self.started:
            return self.account.take_back(over, "restart", "waiting", "checkpoint")
        self.account.take_back(over, "repair", "detect")
        self._settle()
        self.spend(min(self.at / self.step, self.steps))
        self.account.parts["checkpoint"] += max(0.0, self.at - self.steps * self.step)


class ReplicatedRun(RestartRun):
    """Every shard is on several neighbours in a ring; the job restarts when all copies of a shard are lost.

    Replication computes all of its shards in every step. A stacked system (SPARe) computes as few as the living groups
    need to cover all shards: ceil(N / living). Lost groups do not rejoin before the restart.
    """

    def __init__(self, scenario: Scenario, shares: PlanCache, seed: int, copies: int, stacked: bool) -> None:
        self.copies, self.stacked = copies, stacked
        between = scenario.between_failures * endured(scenario.replicas, copies)
        super().__init__(scenario, shares, seed, best_interval(scenario.checkpoint.save_s, between))

    def placed(self) -> None:
        self.groups = self.replicas
        self._living = list(range(self.groups))
        self._dead = bytearray(self.groups)

    def step_seconds(self) -> float:
        rounds = -(-self.groups // len(self._living)) if self.stacked else self.copies
        return self._step(self.groups, rounds)

    def step_with(self, replicas: int) -> float:
        return self._step(replicas, 1 if self.stacked else self.copies)

    def _step(self, groups: int, rounds: int) -> float:
        computing = self.shares.plan(groups).accum * self.microbatch
        return (self._plain(groups) + (rounds - 1) * computing) * self.slow

    def spend(self, steps: float) -> None:
        parts, full = self.account.parts, self.scenario.replicas
        undelayed = self.step / self.slow
        by_right = self.whole * full / self.groups
        parts["productive"] += steps * self.whole
        parts["missing"] += steps * (by_right - self.whole)
        alone = self._plain(self.groups)
        parts["uneven"] += steps * (alone - by_right)
        parts["redundant"] += steps * (undelayed - alone)
        parts["stragglers"] += steps * (self.step - undelayed)

    def lost(self, number: int, chance: float, failure: NodeFailure) -> None:
        if self.now < self.started:
            return self.restart(failure)
        gone = []
        for _ in range(min(number, len(self._living))):
            place = int(chance * len(self._living))
            self._living[place], self._living[-1] = self._living[-1], self._living[place]
            gone.append(self._living.pop())
            self._dead[gone[-1]] = 1
        if not self._living or any(self._wiped(group) for group in gone):
            return self.restart(failure)
        parts = self.account.parts
        self.account.take_back(max(0.0, self.resume - self.now), "repair", "detect")
        detect = self.scenario.recovery.lease_s if failure.silent else self.scenario.recovery.detect_s
        parts["detect"] += detect
        parts["repair"] += self._masking(failure) - detect
        self.resume = self.now + self._masking(failure)
        self.replicas = len(self._living)
        self._pace("redundant")

    def _masking(self, failure: NodeFailure) -> float:
        recovery = self.scenario.recovery
        noticed = recovery.lease_s if failure.silent else recovery.detect_s
        return noticed + self.scenario.repairing(len(self._living))

    def _wiped(self, group: int) -> bool:
        """Whether all holders of a shard of this group are dead: that many neighbours in a row."""
        row, here = 1, group
        while row < self.copies and self._dead[(here := (here + 1) % self.groups)]:
            row += 1
        here = group
        while row < self.copies and self._dead[(here := (here - 1) % self.groups)]:
            row += 1
        return row >= self.copies
