"""Comparison of two runs: samples step by step, losses and parameters bit by bit, and where they first differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from recover.runs.records.goodput import PARTS, PRODUCTIVE, shares
from recover.runs.records.kinds import Line
from recover.runs.report.recorded_runs import Run
from recover.runs.report.wording import many

# Results of a run, and keys that only set paths or the end of the run: none of them explains a difference.
_RESULTS = {
    *("steps", "tokens", "seconds", "tokens_per_second", "effective_throughput", "final_loss", "failures"),
    *(
        "microbatches_min",
        "microbatches_max",
        "replicas_start",
        "replicas_end",
        "parameters_digest",
        "goodput",
        "verified",
        "unverified",
        "corrupt",
        "wrong_sums",
    ),
}
_HARMLESS = {"run_dir", "faults", "min_replicas", "eval.every", "eval.batches"}
_HARMLESS_GROUPS = ("log.", "checkpoint.")
_SHARING = {"replicas", "accum"}  # how work is distributed: named last, since equal runs may differ in it


def compare(one: Run, two: Run) -> str:
    """The comparison in one line."""
    pairs = _common(one, two)
    if not pairs:
        return f"{one.name} and {two.name}: no step that both have committed, nothing to compare"
    losses = _first_difference(pairs, "loss", "losses", "bitwise equal")
    parts = [
        _first_difference(pairs, "data_digest", "sample numbers", "the same in every step"),
        losses,
        _parameters(one, two),
    ]
    line = f"{one.name} and {two.name}, {_extent(one, two, pairs)}: {'; '.join(parts)}"
    different = recorded_differences(one, two)
    if different and any("differ" in part for part in parts):
        named = ", ".join(f"{key} ({mine} against {theirs})" for key, mine, theirs in different[:3])
        line += f"; recorded differences: {named}"
        line += f" and {many(len(different) - 3, 'more', 'more')}" if len(different) > 3 else ""
    return line


def compare_goodput(one: Run, two: Run) -> str:
    """`goodput 97.1% against 88.4%, most of it by repair (0.0% against 5.2%)`. The part that is named is larger in
    the run with the lower goodput: a part in which that run is the better one explains nothing."""
    mine, theirs = (shares(run.goodput) for run in (one, two))
    text = f"goodput {one.goodput['goodput']:.1%} against {two.goodput['goodput']:.1%}"
    sign = -1 if one.goodput["goodput"] < two.goodput["goodput"] else 1
    explains = {name: sign * (theirs[name] - mine[name]) for name in mine if name not in PRODUCTIVE}
    most = max(explains, key=lambda name: explains[name])
    if explains[most] >= 0.0005:
        text += f", most of it by {PARTS[most]} ({mine[most]:.1%} against {theirs[most]:.1%})"
    return text


def _common(one: Run, two: Run) -> list[tuple[Line, Line]]:
    theirs = {line["step"]: line for line in two.steps}
    return [(line, theirs[line["step"]]) for line in one.steps if line["step"] in theirs]


def _extent(one: Run, two: Run, pairs: list[tuple[Line, Line]]) -> str:
    if len(one.steps) == len(two.steps) == len(pairs):
        return many(len(pairs), "step")
    return f"the {many(len(pairs), 'step')} in common (of {len(one.steps)} and {len(two.steps)})"


def _first_difference(pairs: list[tuple[Line, Line]], key: str, noun: str, equal: str) -> str:
    for mine, theirs in pairs:
        if key not in mine or key not in theirs:
            return f"{noun} not recorded in step {mine['step']}"
        # The shortest decimal form identifies a float exactly, and unlike the float itself, NaN equals NaN in it.
        if repr(mine[key]) != repr(theirs[key]):
            values = f" ({mine[key]!r} against {theirs[key]!r}){_largest(pairs)}" if key == "loss" else ""
            return f"{noun} first differ at step {mine['step']}{values}"
    return f"{noun} {equal}"


def _largest(pairs: list[tuple[Line, Line]]) -> str:
    """The largest difference of the losses of a step: rounding, or another trajectory. Empty if a
    loss is missing or not finite."""
    if any(line.get("loss") is None for pair in pairs for line in pair):
        return ""
    differences = [abs(mine["loss"] - theirs["loss"]) for mine, theirs in pairs]
    return f", never by more than {max(differences):.1e}" if all(map(math.isfinite, differences)) else ""


def _parameters(one: Run, two: Run) -> str:
    digests = [run.summary.get("parameters_digest") for run in (one, two)]
    unknown = [run for run, digest in zip((one, two), digests, strict=True) if not digest]
    if unknown:
        why = (
            f"{run.name} has {'recorded none' if run.summary else f'no summary: {_first_clause(run.state.text)}'}"
            for run in unknown
        )
        return f"parameters not known ({', and '.join(why)})"
    if digests[0] == digests[1]:
        return "parameters bitwise equal"
    unequal = one.steps[-1]["step"] != two.steps[-1]["step"]
    return "parameters differ" + (", after different numbers of steps" if unequal else "")


def recorded_differences(
    one: Run, two: Run, environments: Sequence[Line] = ({}, {})
) -> list[tuple[str, Any, Any]]:
    """Keys of the configuration and of the recorded environment that differ; how work is distributed comes last.
    `environments`: facts that are known besides those of the summaries."""
    found = _differences(one, two, environments)
    return sorted(found, key=lambda difference: difference[0] in _SHARING)


def _differences(one: Run, two: Run, environments: Sequence[Line]) -> Iterator[tuple[str, Any, Any]]:
    """Yield differences in the order in which the keys were written. The environment is in the summary: a run without a
    summary may have had the same one."""
    mine, theirs = (_flat(run.config) for run in (one, two))
    if one.summary and two.summary:
        mine, theirs = mine | _flat(_environment(one.summary)), theirs | _flat(_environment(two.summary))
    if all(environments):
        mine, theirs = (
            {f"environment.{key}": value for key, value in _flat(facts).items()} | known
            for facts, known in zip(environments, (mine, theirs), strict=True)
        )
    for key in [*mine, *(key for key in theirs if key not in mine)]:
        if key in _HARMLESS or key.startswith(_HARMLESS_GROUPS):
            continue
        if mine.get(key) != theirs.get(key):
            yield key, mine.get(key, "not set"), theirs.get(key, "not set")


def _environment(summary: Line) -> Line:
    return {key: value for key, value in summary.items() if key not in _RESULTS}


def _flat(mapping: Line, prefix: str = "") -> Line:
    flat: Line = {}
    for key, value in mapping.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _first_clause(text: str) -> str:
    return text.partition(";")[0]
