"""Systems that discard the step of a failure, as torchft and FT-HSDP do, in virtual time."""

from __future__ import annotations

import math

from recover_lab.simulate.elastic import ElasticRun
from recover_lab.simulate.failures import NodeFailure
from recover_lab.simulate.plan_cache import PlanCache
from recover_lab.simulate.scenario import Scenario


class DiscardingRun(ElasticRun):
    """A run that discards the step of a failure: the batch shrinks, or spare replicas that did not count keep it."""

    def __init__(self, scenario: Scenario, shares: PlanCache, seed: int, spares: int = 0) -> None:
        self.counting = scenario.replicas - spares if spares else 0  # replicas that count; 0: all
        self.blocked = -1.0
        super().__init__(scenario, shares, seed, returning=True)
        self.start_s = scenario.discarding.start_s
        self.stall = scenario.discarding.stall_s + scenario.transfer

    def duration(self, replicas: int, slow: float = 1.0) -> float:
        return super().duration(self.counting or replicas, slow)

    def begin(self, at: float) -> None:
        if self.replicas >= self.counting:
            if self.blocked >= 0:
                self.account.parts["waiting"] += at - self.blocked
                self.blocked = -1.0
            return super().begin(at)
        if self.blocked < 0 or at == self.pause_ends:  # from now, or from the end of a restart
            self.blocked = at
        self.began = self.end = math.inf
        self.losses, self.trail, self.at_start, self.slow_then = (), [], self.replicas, self.slow

    def spend(self, replicas: int, slow: float, steps: float) -> None:
        if not self.counting:
            return super().spend(replicas, slow, steps)
        parts, whole = self.account.parts, self.scenario.full_step
        took = self.duration(replicas, slow)
        plain = took / slow / self.stretch - self.vote
        parts["productive"] += steps * whole
        parts["redundant"] += steps * (plain - whole)
        parts["vote"] += steps * self.vote
        parts["checkpoint"] += steps * (took / slow - plain - self.vote)
        parts["stragglers"] += steps * (took - took / slow)

    def manage(self, now: float) -> None:
        super().manage(now)
        if self.blocked >= 0 and self.asking and now >= self.blocked:
            self.boundary(now)

    def boundary(self, now: float) -> None:
        waited, parts = self.blocked >= 0, self.account.parts
        before = parts["joining"]
        super().boundary(now)
        if waited:  # a job that waits for nodes is not stalled by a joining replica
            parts["waiting" if self.blocked < 0 else "joining"] -= parts["joining"] - before

    def replicas_lost(self, now: float, number: int, chance: float, failure: NodeFailure) -> None:
        cost, parts = self.scenario.discarding, self.account.parts
        noticed = max(cost.timeout_s, self.scenario.recovery.lease_s if failure.silent else 0.0)
        self.replicas -= number
        if self.blocked >= 0:
            return
        parts["discarded"] += max(0.0, now - self.began)
        # Still in the pause of another loss: the rest of that pause is cancelled.
        self.account.take_back(max(0.0, self.began - now), "repair", "detect", "joining")
        parts["detect"] += noticed
        agreeing = cost.quorum_s + self.scenario.recovery.repair_ms_per_replica / 1e3 * self.replicas
        parts["repair"] += agreeing
        self.account.living += (noticed + agreeing) * self.replicas
        self.begin(now + noticed + agreeing)

    def cut(self, over: float) -> None:
        if self.blocked >= 0:
            self.account.parts["waiting"] += max(0.0, self.horizon - self.blocked)
            over = max(0.0, self.blocked - self.horizon)
        self.account.take_back(over, "repair", "detect", "restart", "joining", "waiting")

    def all_lost(self, now: float) -> None:
        if self.blocked < 0:
            return super().all_lost(now)
        self.restart(now)

    def restart(self, now: float, save: float = 0.0) -> None:
        if self.blocked >= 0:
            self.account.parts["waiting"] += max(0.0, now - self.blocked)
            self.blocked = -1.0
        super().restart(now, save)
