"""The answer of `recover simulate` in sentences. Every number in them is taken from simulated runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recover_lab.confidence import mean_interval
from recover_lab.simulate.account import PARTS
from recover_lab.simulate.break_even import break_even, even_steps
from recover_lab.simulate.number_words import figure, many, quantity
from recover_lab.simulate.plan_cache import PlanCache
from recover_lab.simulate.race import SystemResult, race
from recover_lab.simulate.scenario import Scenario
from recover_lab.simulate.scenario_keys import DAY, HOUR
from recover_lab.simulate.step_tokens import far_above_usual, usual_tokens

OURS, THEIRS, MEMORY, SHRINKING = "recover-return", "restart", "restart-memory", "torchft"
NO_ANSWER = (
    f"run.systems has not both {OURS} and {THEIRS}, which the answer compares; the tables have the others."
)
_SMALL = 0.0005  # of goodput: not worth a word


@dataclass(frozen=True)
class ClusterAnswer:
    """ReCoVer with rejoins against checkpoint-restart."""

    scenario: Scenario
    ours: SystemResult
    theirs: SystemResult
    others: Mapping[str, SystemResult]
    spare: Mapping[str, SystemResult] | None = None  # both with one spare node more
    finer: SystemResult | None = None  # ours with twice as many microbatches of half the size
    even: float | None = None  # failures per node and day at which both are even; 0: ours is always ahead
    even_steps: tuple[int, int | None] | None = (
        None  # microbatches per replica: the most behind, the fewest ahead
    )
    searched: bool = False  # for the break-even

    @property
    def gain(self) -> tuple[float, float, float]:
        """Tokens more than checkpoint-restart's, as a share of them: mean and 95% interval over the seeds."""
        pairs = zip(self.ours.goodputs, self.theirs.goodputs, strict=True)
        mean, low, high = mean_interval([mine - other for mine, other in pairs])
        base = self.theirs.goodput.mean
        return mean / base, low / base, high / base

    @property
    def gpus_gained(self) -> float:
        """GPUs whose work without failures is the difference."""
        return (self.ours.goodput.mean - self.theirs.goodput.mean) * self.scenario.gpus

    def to_json(self) -> dict[str, Any]:
        mean, low, high = self.gain
        between = self.scenario.between_failures * self.scenario.failures.per_node_day
        return {
            "sentences": self.sentences(),
            "gain": {"mean": mean, "low": low, "high": high},
            "gpus_gained": self.gpus_gained,
            "uneven": self.ours.parts["uneven"],
            "with_spare_node": self.spare and {name: result.to_json() for name, result in self.spare.items()},
            "with_half_microbatches": self.finer and self.finer.to_json(),
            "break_even_per_node_day": self.even,
            "break_even_hours": between / self.even / HOUR if self.even else None,
            "break_even_tokens_per_step": self.even_steps
            and [accum and accum * self._one_round for accum in self.even_steps],
        }

    def sentences(self) -> list[str]:
        """The answer first, then its reasons."""
        found = [self._headline(), self._gap()]
        found += [self._spare()] if self.spare else []
        found += [self._finer()] if self.finer else []
        found += [self._even_steps()] if self.even_steps else []
        found += [self._break_even()] if self.searched else []
        return [*found, *self._others()]

    def _headline(self) -> str:
        scenario, (mean, low, high) = self.scenario, self.gain
        ends = (-high, -low) if high < 0 else (low, high)  # of the loss, where it is one
        seeds = f"95% interval {ends[0]:.1%} to {ends[1]:.1%}, {len(self.ours.goodputs)} seeds"
        if len(self.ours.goodputs) < 2:
            seeds = "one seed: give run.seeds=16 for an interval"
        ours, theirs = f"{self.ours.goodput.mean:.1%}", f"{self.theirs.goodput.mean:.1%}"
        told = (
            f"On {_machines(scenario)} with a failure every {hours(scenario.between_failures)}{_model(scenario)} and "
            f"{quantity(scenario.tokens_per_step)} tokens per step, ReCoVer yields {ours} of the tokens of a cluster "
            f"without failures, checkpoint-restart {theirs}: "
        )
        if low <= 0 <= high:
            return f"{told}no difference that can be shown ({_signed(mean)}; {seeds}). ReCoVer is not worth it here."
        if mean < 0:
            return f"{told}{-mean:.1%} fewer tokens ({seeds}). ReCoVer is not worth it here."
        worth = "" if len(self.ours.goodputs) < 2 else " ReCoVer is worth it here."
        return f"{told}{mean:.1%} more tokens ({seeds}), the work of {_count(self.gpus_gained)}.{worth}"

    def _gap(self) -> str:
        parts = {
            part: share for part, share in self.ours.parts.items() if part != "productive" and share > _SMALL
        }
        lacking = 1 - self.ours.goodput.mean
        if not parts:
            return f"ReCoVer lacks {_points(lacking)} points of 100%: too few to be divided."
        largest = sorted(parts.items(), key=lambda item: -item[1])
        told = ", ".join(f"{PARTS[part]} {_points(share)}" for part, share in largest)
        reason = self._rounds() if "uneven" in parts else ""
        return f"Of the {_points(lacking)} points that ReCoVer lacks to 100%: {told}.{reason}"

    def _rounds(self) -> str:
        scenario = self.scenario
        left = scenario.replicas - scenario.unit_replicas
        plans = PlanCache(scenario.job.policy, scenario.replicas, scenario.global_batch)
        return (
            f" Uneven shares: B = {scenario.global_batch:,} microbatches take {many(scenario.job.accum, 'round')} on "
            f"{scenario.replicas:,} replicas and {plans.plan(left).accum} on {left:,}, where "
            f"{scenario.job.accum * scenario.replicas / left:.2f} would be even."
        )

    def _spare(self) -> str:
        assert self.spare is not None
        ours, theirs = self.spare[OURS], self.spare[THEIRS]
        more = ours.tokens_per_day.mean / self.ours.tokens_per_day.mean - 1
        others = theirs.tokens_per_day.mean / self.theirs.tokens_per_day.mean - 1
        cost = self.scenario.cluster.gpus_per_node / self.scenario.gpus
        pairs = zip(ours.goodputs, self.ours.goodputs, strict=True)
        _, low, high = mean_interval([after - before for after, before in pairs])
        verdict = (
            "which pays" if low > 0 else "which does not pay" if high < 0 else "about as much as it costs"
        )
        return (
            f"With one spare node more (cluster.spares={self.scenario.cluster.spares + 1}; {cost:.2%} more GPUs) "
            f"ReCoVer trains {_signed(more)} tokens a day, {verdict}, and checkpoint-restart {_signed(others)}; the "
            f"yields of all GPUs are then {ours.goodput.mean:.1%} and {theirs.goodput.mean:.1%}."
        )

    def _finer(self) -> str:
        assert self.finer is not None
        job = self.scenario.job
        return (
            f"With twice as many microbatches of half the size (job.accum={2 * job.accum} "
            f"job.tokens={job.tokens // 2}) uneven shares cost {_points(self.finer.parts['uneven'])} points instead of "
            f"{_points(self.ours.parts['uneven'])}, and ReCoVer yields {self.finer.goodput.mean:.1%}, if the GPUs are "
            "as fast on them."
        )

    @property
    def _one_round(self) -> int:
        """Tokens of one microbatch on each replica."""
        return self.scenario.tokens_per_step // self.scenario.job.accum

    def _even_steps(self) -> str:
        assert self.even_steps is not None
        behind, ahead = (
            accum and f"{quantity(accum * self._one_round)} (job.accum={accum})" for accum in self.even_steps
        )
        told = "Tokens per step, at this rate of failures:"
        if ahead is None:
            return (
                f"{told} ReCoVer is behind checkpoint-restart even with {behind}, the most that were tried."
            )
        if not behind:
            return (
                f"{told} ReCoVer is ahead of checkpoint-restart from {ahead}, the fewest possible here, on."
            )
        return (
            f"{told} ReCoVer and checkpoint-restart are even between {behind} and {ahead}; ReCoVer is ahead in every "
            "larger step that was tried."
        )

    def _break_even(self) -> str:
        scenario = self.scenario
        if self.even is None:
            return "Break-even: none. ReCoVer is behind checkpoint-restart at every rate of failures tried."
        if not self.even:
            return (
                "Break-even: none. ReCoVer is ahead of checkpoint-restart down to a ten-thousandth of this rate of "
                "failures."
            )
        between = scenario.between_failures * scenario.failures.per_node_day / self.even
        size = scenario.cluster.nodes * scenario.cluster.gpus_per_node * scenario.between_failures / between
        fewer = f"fewer than about {_round(size)} GPUs at this rate of failures per node"
        if size < 2 * scenario.job.replica_gpus:
            fewer = "at this rate of failures per node, a cluster too small for two replicas"
        return (
            f"Break-even: where the job has a failure less often than every {hours(between)} ({fewer}), ReCoVer is "
            f"not worth it: its votes (recovery.vote_s={scenario.recovery.vote_s:g} in steps of "
            f"{scenario.full_step:.3g} s) and checkpoints cost more than checkpoint-restart loses."
        )

    def _others(self) -> list[str]:
        found = []
        memory, shrinking = self.others.get(MEMORY), self.others.get(SHRINKING)
        if memory and memory.goodput.mean > self.theirs.goodput.mean:
            apart = self.ours.goodput.mean / memory.goodput.mean - 1
            found.append(
                f"Against checkpoint-restart from the memory of neighbours ({memory.goodput.mean:.1%}) the difference "
                f"is {_signed(apart)}."
            )
        if shrinking and shrinking.goodput.mean > self.ours.goodput.mean:
            found.append(
                f"A system that lets the batch shrink, as torchft does, yields {shrinking.goodput.mean:.1%}: it has no "
                f"uneven shares, but its steps had {shrinking.batch:,.1f} microbatches on average and "
                f"{shrinking.smallest_batch:,} at least, not B = {self.scenario.global_batch:,}: another training."
            )
        return found


def answer(scenario: Scenario, results: Mapping[str, SystemResult], more: bool) -> ClusterAnswer | None:
    """The answer; None if the systems of the comparison were not run. With `more`, also a spare node, finer
    shares, break-even."""
    if OURS not in results or THEIRS not in results:
        return None
    found = ClusterAnswer(scenario, results[OURS], results[THEIRS], results)
    if not more:
        return found
    job = scenario.job
    finer = None
    if found.ours.parts["uneven"] > 2 * _SMALL and job.tokens % 2 == 0:
        half = None if job.microbatch_s is None else job.microbatch_s / 2
        other = scenario.but(job__accum=2 * job.accum, job__tokens=job.tokens // 2, job__microbatch_s=half)
        finer = race(other, [OURS])[OURS]
    spare = race(scenario.but(cluster__spares=scenario.cluster.spares + 1), [OURS, THEIRS])
    even, steps = break_even(scenario, OURS, THEIRS), even_steps(scenario, OURS, THEIRS)
    return ClusterAnswer(
        scenario, found.ours, found.theirs, results, spare, finer, even, steps, searched=True
    )


def assumed_model(scenario: Scenario, origins: Mapping[str, str]) -> str:
    """A sentence that names the default model and how to choose another; "" if the model was given or is not used."""
    if scenario.job.microbatch_s is not None or "job.parameters" in origins:
        return ""
    return (
        f"The model of {quantity(scenario.job.parameters)} parameters is the default, since job.parameters is not "
        "given; a model of another size may reverse the answer: give the size of yours, such as job.parameters=8e9."
    )


def understood(scenario: Scenario, origins: Mapping[str, str], words: Mapping[str, Any]) -> list[str]:
    """How the question was read: the rate of failures in three ways, the job, and a step that is unusually large."""
    cluster, job = scenario.cluster, scenario.job
    node = DAY / scenario.failures.per_node_day / HOUR
    given = (
        f"mtbf_hours={words['mtbf_hours']} mtbf_of={words['mtbf_of']}"
        if "mtbf_hours" in words
        else f"failures.per_node_day={scenario.failures.per_node_day:.4g} "
        f"({origins.get('failures.per_node_day', 'default')})"
    )
    rate = (
        f"Understood: {given}: a GPU fails every {figure(node * cluster.gpus_per_node)} hours, a node "
        f"({cluster.gpus_per_node} GPUs) every {figure(node)}, the job ({_nodes(cluster.nodes)}) every "
        f"{figure(node / cluster.nodes)}."
    )
    if job.microbatch_s is None:
        source = origins.get("job.parameters", "default: set job.parameters")
        model = f"a model of {quantity(job.parameters)} parameters ({source})"
    else:
        model = f"microbatches of {job.microbatch_s:.3g} s"
    step = f"{quantity(scenario.tokens_per_step)} tokens per step"
    if origins.get("job.accum", "").startswith("usual"):
        usual, models = usual_tokens(job.parameters)
        step += f", nearest to the usual {quantity(usual)} ({models})"
    spares = _nodes(cluster.spares, "spare ")
    return [
        rate,
        f"Assumed: {model} on {scenario.replicas:,} replicas of {many(job.replica_gpus, 'GPU')}, "
        f"{many(job.accum, 'microbatch')} of {many(job.tokens, 'token')} each: {step}; a restart of the job takes "
        f"{minutes(scenario.restart.seconds)} and a checkpoint {figure(scenario.checkpoint.save_s)} s, a broken node "
        f"is back after {many(scenario.failures.repair_hours, 'hour')}, {spares}; `recover simulate --help` lists all "
        "keys.",
        *([unusual] if (unusual := far_above_usual(scenario)) else []),
    ]


def hours(seconds: float) -> str:
    if seconds >= 1000 * HOUR:
        return (
            f"{figure(seconds / DAY)} days"
            if seconds < 1000 * DAY
            else f"{figure(seconds / DAY / 365)} years"
        )
    return f"{figure(seconds / HOUR)} hours" if seconds >= 2 * HOUR else minutes(seconds)


def minutes(seconds: float) -> str:
    return f"{figure(seconds / 60)} minutes" if seconds >= 120 else f"{seconds:.3g} s"


def _machines(scenario: Scenario) -> str:
    cluster, job = scenario.cluster, scenario.job
    kind = re.search(r"\b[A-Z]+\d+\w*", job.gpu)
    name = "GPUs" if job.microbatch_s is not None or kind is None else kind[0]
    spares = f" and {_nodes(cluster.spares, 'spare ')}" if cluster.spares else ""
    return f"{cluster.nodes * cluster.gpus_per_node:,} {name}{spares}"


def _model(scenario: Scenario) -> str:
    """The model in words. Empty with measured microbatches: then the size of the model is not known."""
    job = scenario.job
    return "" if job.microbatch_s is not None else f", a model of {quantity(job.parameters)} parameters"


def _count(gpus: float) -> str:
    return many(round(gpus) if gpus >= 9.5 else float(f"{gpus:.2g}"), "GPU")


def _points(share: float) -> str:
    return f"{100 * share:.1f}"


def _signed(share: float) -> str:
    return f"{round(share, 3) + 0.0:+.1%}"  # without a negative zero


def _nodes(number: int, kind: str = "") -> str:
    return many(number, f"{kind}node")


def _round(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.2g}"
