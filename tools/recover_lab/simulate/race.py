"""Runs all systems of a scenario under the same failures, and summarizes them over the seeds."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from recover_lab.simulate.account import PARTS, TimeSpent
from recover_lab.simulate.closed_forms import best_interval
from recover_lab.simulate.discarding import DiscardingRun
from recover_lab.simulate.elastic import ElasticRun
from recover_lab.simulate.plan_cache import PlanCache
from recover_lab.simulate.restart import ReplicatedRun, RestartRun
from recover_lab.simulate.scenario import Scenario
from recover_lab.simulate.scenario_keys import DAY

_SHARED = 40_000  # failures from which on a second core pays off


@dataclass(frozen=True)
class Spread:
    """Mean and deciles over the seeds."""

    mean: float
    low: float  # the lowest tenth of the seeds is below
    high: float  # the highest tenth is above

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.fmean(values), tenths[0], tenths[-1])


@dataclass(frozen=True)
class SystemResult:
    """Results of one system."""

    system: str
    goodput: Spread
    tokens_per_day: Spread
    days_to_budget: Spread
    per_living: float  # tokens per second and GPU of a living replica
    batch: float  # microbatches in a step, the mean
    smallest_batch: int
    parts: dict[str, float]  # of all GPU time, adding up to 1
    failures: float  # means over the seeds
    struck: float
    joined: float
    restarts: float
    every: float | None  # seconds between checkpoints, of those that restart
    goodputs: tuple[float, ...]  # of each seed, in order: seed by seed comparable between systems

    def to_json(self) -> dict[str, object]:
        from dataclasses import asdict

        return asdict(self)


def checkpoint_interval(scenario: Scenario, system: str) -> float | None:
    """Seconds between checkpoints of a system that restarts from them."""
    cost = scenario.checkpoint
    if system == "restart":
        return cost.every_s or best_interval(cost.save_s, scenario.between_failures)
    if system == "restart-paper":
        return scenario.between_failures
    if system == "restart-memory":
        return best_interval(cost.memory_save_s, scenario.between_failures)
    return None


class SystemRunner:
    """Runs systems of a scenario, which share one cache of plans."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        batch, replicas = scenario.global_batch, scenario.replicas
        self.shares = PlanCache(scenario.job.policy, replicas, batch)
        self.balanced = (
            self.shares if scenario.job.policy == "balanced" else PlanCache("balanced", replicas, batch)
        )
        self.shrinking = PlanCache("adaptive", replicas, batch)

    def run(self, system: str, seed: int) -> TimeSpent:
        scenario = self.scenario
        match system:
            case "recover" | "recover-return":
                return ElasticRun(scenario, self.shares, seed, system == "recover-return").run()
            case "torchft":
                return DiscardingRun(scenario, self.shrinking, seed).run()
            case "torchft-spares":
                return DiscardingRun(scenario, self.balanced, seed, scenario.spare_replicas).run()
            case "replication":
                return ReplicatedRun(
                    scenario, self.balanced, seed, scenario.replication.copies, stacked=False
                ).run()
            case "stacked":
                return ReplicatedRun(scenario, self.balanced, seed, scenario.stack, stacked=True).run()
        every = checkpoint_interval(scenario, system)
        assert every is not None, system
        return RestartRun(scenario, self.balanced, seed, every, memory=system == "restart-memory").run()


def race(scenario: Scenario, systems: Iterable[str] | None = None) -> dict[str, SystemResult]:
    """Run every system with all seeds."""
    names = list(systems or scenario.systems)
    seeds = range(scenario.run.first_seed, scenario.run.first_seed + scenario.run.seeds)
    expected = scenario.run.days * DAY / scenario.between_failures * len(seeds) * len(names)
    cores = min(os.cpu_count() or 1, 8)
    if expected < _SHARED or cores < 2:
        track = SystemRunner(scenario)
        runs = {name: [track.run(name, seed) for seed in seeds] for name in names}
    else:
        with ProcessPoolExecutor(cores, initializer=_prepare, initargs=(scenario,)) as pool:
            tasks = {
                name: [pool.submit(_run, name, list(seeds[k::cores])) for k in range(cores)] for name in names
            }
            runs = {name: _in_order([task.result() for task in those]) for name, those in tasks.items()}
    return {name: summarize(scenario, name, accounts) for name, accounts in runs.items()}


def _in_order(dealt: Sequence[Sequence[TimeSpent]]) -> list[TimeSpent]:
    """The runs in the order of their seeds, which were dealt to the cores one by one."""
    rounds = itertools.zip_longest(*dealt)
    return [run for runs in rounds for run in runs if run is not None]


_runner: SystemRunner | None = None  # in a process of the pool


def _prepare(scenario: Scenario) -> None:
    global _runner
    _runner = SystemRunner(scenario)


def _run(system: str, seeds: list[int]) -> list[TimeSpent]:
    assert _runner is not None
    return [_runner.run(system, seed) for seed in seeds]


def summarize(scenario: Scenario, system: str, accounts: Sequence[TimeSpent]) -> SystemResult:
    rates = [account.tokens_per_day(scenario) for account in accounts]
    goodputs = tuple(account.goodput(scenario) for account in accounts)
    shares = [account.shares(scenario) for account in accounts]
    per_second = [rate / DAY * account.seconds for rate, account in zip(rates, accounts, strict=True)]
    living = sum(account.living for account in accounts) * scenario.job.replica_gpus
    return SystemResult(
        system=system,
        goodput=Spread.of(goodputs),
        tokens_per_day=Spread.of(rates),
        days_to_budget=Spread.of([scenario.job.budget / max(rate, 1e-9) for rate in rates]),
        per_living=sum(per_second) / living if living else 0.0,
        batch=sum(a.microbatches for a in accounts) / max(1, sum(a.steps for a in accounts)),
        smallest_batch=min((a.smallest for a in accounts if a.smallest), default=0),
        parts={part: statistics.fmean(share[part] for share in shares) for part in PARTS},
        failures=statistics.fmean(a.failures for a in accounts),
        struck=statistics.fmean(a.struck for a in accounts),
        joined=statistics.fmean(a.joined for a in accounts),
        restarts=statistics.fmean(a.restarts for a in accounts),
        every=checkpoint_interval(scenario, system),
        goodputs=goodputs,
    )
