"""The first step in which two runs differ, and what differs there.

Every line of `steps.jsonl` has digests of what the step began with (parameters, sample numbers, contents of the
samples) next to what came out of it (loss, gradient norm), so that causes can be told from effects without computing
anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from recover.runs.records.environments import environments
from recover.runs.records.kinds import Line
from recover.runs.report.comparison import recorded_differences
from recover.runs.report.recorded_runs import Run


@dataclass(frozen=True)
class Bisection:
    """The first difference of two runs."""

    step: int  # the first step that differs; 0: none does
    what: str  # samples, parameters, learning rate or environment; "" if no step differs
    text: str
    causes: tuple[str, ...] = ()  # recorded differences of configuration and environment


def bisect(one: Run, two: Run) -> Bisection:
    """Find the first step in which two runs differ. Raises ValueError if they have no step in common."""
    theirs = {line["step"]: line for line in two.steps}
    pairs = [(line, theirs[line["step"]]) for line in one.steps if line["step"] in theirs]
    if not pairs:
        raise ValueError(f"{one.name} and {two.name} have no step in common: there is nothing to compare")
    different = recorded_differences(one, two, [_environment(run) for run in (one, two)])
    causes = tuple(f"{key}: {mine} against {their}" for key, mine, their in different)
    shapes = {_shape(run) for run in (one, two)}
    for place, (mine, their) in enumerate(pairs):
        before = pairs[place - 1][0]["step"] if place else None
        for what, text in _differences(mine, their, before, comparable=len(shapes) == 1):
            return Bisection(mine["step"], what, text, causes)
    first, last = pairs[0][0]["step"], pairs[-1][0]["step"]
    digests = [run.summary.get("parameters_digest") for run in (one, two)]
    if one.steps[-1]["step"] == two.steps[-1]["step"] and all(digests) and digests[0] != digests[1]:
        text = (
            f"the update of step {last}: its samples and its loss are equal, the parameters after it are not"
        )
        return Bisection(last, "parameters", text, causes)
    unseen = (
        ""
        if len(shapes) == 1
        else "; replicas have different shapes, so digests of parameters were not compared"
    )
    return Bisection(0, "", f"no difference in steps {first} to {last}{unseen}")


def _differences(mine: Line, their: Line, before: int | None, comparable: bool) -> Iterator[tuple[str, str]]:
    """Yield the differences of a step, causes before effects."""

    def differ(key: str) -> bool:
        return key in mine and key in their and mine[key] != their[key]

    if comparable and differ("parameters_before"):
        if before is None:
            yield "parameters", f"the parameters before step {mine['step']}, the first that both have"
        else:
            yield (
                "parameters",
                f"the update of step {before}: it began with equal parameters and samples and had the same loss, and "
                "led to other parameters",
            )
    if differ("microbatches") or differ("data_digest"):
        yield "samples", f"step {mine['step']} was computed on other sample numbers"
    if differ("contents"):
        yield "samples", f"step {mine['step']} was computed on the same sample numbers with other contents"
    if differ("lr"):
        yield "learning rate", f"step {mine['step']} had learning rate {mine['lr']!r} against {their['lr']!r}"
    for key in ("loss", "grad_norm", "skipped"):
        if mine.get(key) != their.get(key):
            yield (
                "environment",
                f"step {mine['step']} began with equal parameters and samples, and had {key} {mine.get(key)!r} against "
                f"{their.get(key)!r}: it was computed in another way",
            )


def _shape(run: Run) -> str:
    """How a replica is sharded: digests of parameters depend on it."""
    config = run.config
    keys = ("parallel", "shard", "tp", "pp", "ep", "schedule")
    return repr([config.get(key) for key in keys]) if config else repr(_environment(run).get("replica_size"))


def _environment(run: Run) -> Line:
    try:
        found = environments(run.path)
    except ValueError:
        return {}  # the steps are compared without it
    return next(iter(found.values()), {})
