"""One question to `recover simulate`, and its results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recover.job.config_keys import read
from recover_lab.simulate.answer import OURS, THEIRS, ClusterAnswer, answer, assumed_model, understood
from recover_lab.simulate.break_even import Change, Curve, crossings, curve, leaders, rates, value_of_changes
from recover_lab.simulate.detection import Detection, detection
from recover_lab.simulate.learned import learn
from recover_lab.simulate.number_words import figure
from recover_lab.simulate.presets import preset
from recover_lab.simulate.question_words import translate
from recover_lab.simulate.race import SystemResult, race
from recover_lab.simulate.scenario import Scenario, flat_scenario, keys_of_scenario, parse_scenario
from recover_lab.simulate.scenario_keys import DAY, SYSTEMS
from recover_lab.simulate.step_tokens import TOKENS_PER_STEP, accum_of, usual_accum

_POINTS = 8  # of a sweep that gives no number


@dataclass(frozen=True)
class Question:
    scenario: Scenario
    title: str
    notes: tuple[str, ...]  # its source, and its assumptions
    origins: dict[str, str]  # source of every key that is not at its default
    understood: tuple[str, ...] = ()  # how the rate of failures and the job were read
    assumed_model: str = ""  # a sentence, if the model is the default

    def to_json(self) -> dict[str, Any]:
        values = flat_scenario(self.scenario)
        return {
            "title": self.title,
            "notes": self.notes,
            "understood": self.understood,
            "assumed_model": self.assumed_model,
            "scenario": values,
            "origins": self.origins,
            "gpus": self.scenario.gpus,
            "replicas": self.scenario.replicas,
            "global_batch": self.scenario.global_batch,
            "tokens_per_step": self.scenario.tokens_per_step,
            "step_seconds": self.scenario.full_step,
            "between_failures_seconds": self.scenario.between_failures,
        }


@dataclass(frozen=True)
class Study:
    question: Question
    results: dict[str, SystemResult]
    rates: Curve | None = None
    changes: tuple[Change, ...] = ()
    sweep: Curve | None = None
    answer: ClusterAnswer | None = None  # None without the systems that it compares
    verification: Detection | None = None  # None if verify.slots is 0
    crossed: tuple[tuple[str, str, float], ...] = field(default=())  # one, other, failures per node-day

    def to_json(self) -> dict[str, Any]:
        return {
            **self.question.to_json(),
            "answer": self.answer.to_json() if self.answer else None,
            "verification": self.verification.to_json() if self.verification else None,
            "systems": {name: result.to_json() for name, result in self.results.items()},
            "rates": self.rates.to_json() if self.rates else None,
            "crossings": [
                {"one": one, "other": other, "failures.per_node_day": rate}
                for one, other, rate in self.crossed
            ],
            "leaders": leaders(self.rates) if self.rates else None,
            "worth": [asdict(change) for change in self.changes],
            "sweep": self.sweep.to_json() if self.sweep else None,
        }


def ask(words: Sequence[str], name: str | None, sources: Sequence[Path]) -> Question:
    """Read a question: given words and keys, then measured values, then a preset, then the defaults."""
    layers: list[tuple[str, Mapping[str, Any]]] = []
    notes: list[str] = []
    if name is not None:
        found = preset(name)
        layers.append((f"preset {name}", found.values))
        notes += [f"{name}: {found.about}. {found.source}.", f"Assumed: {found.assumed}."]
    if sources:
        layers.append((f"measured: {', '.join(map(str, sources))}", learn(sources)))
    given = read(words)
    below = {key: value for _, layer in layers for key, value in layer.items()}
    layers.append(("given", translate(given, below)))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        values |= layer
        origins |= dict.fromkeys(layer, origin)
    if name is not None:
        published = set(preset(name).published)
        for key, origin in origins.items():
            if origin == f"preset {name}":
                origins[key] = "published" if key in published else "assumed"
    scenario = parse_scenario(values)
    if TOKENS_PER_STEP in given:
        scenario = scenario.but(job__accum=accum_of(scenario, given[TOKENS_PER_STEP]))
        origins["job.accum"] = "given"
    elif "job.accum" not in values and scenario.job.microbatch_s is None:
        scenario = scenario.but(job__accum=usual_accum(scenario))
        origins["job.accum"] = "usual for the model's size"
    read_as = understood(scenario, origins, given)
    model = assumed_model(scenario, origins)
    return Question(scenario, title_of(scenario), tuple(notes), origins, tuple(read_as), model)


def title_of(scenario: Scenario) -> str:
    gpus = scenario.cluster.nodes * scenario.cluster.gpus_per_node
    return f"{gpus:,} GPUs, {scenario.replicas:,} replicas, a failure every {span(scenario.between_failures)}"


def span(seconds: float) -> str:
    for length, name in ((DAY, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * length:
            return f"{figure(seconds / length)} {name}"
    return f"{seconds:.3g} s"


def parse_sweep(text: str) -> tuple[str, list[float]]:
    """`nodes=8:80000`, `failures.per_node_day=1e-4:1e-1:12`: the key and its values."""
    key, equals, ends = text.partition("=")
    known = {key for key, *_ in keys_of_scenario()}
    names = [full for full in known if full == key or full.endswith(f".{key}")]
    if len(names) != 1:
        many = f"means one of {', '.join(sorted(names))}" if names else "is no key"
        raise ValueError(f"--sweep {text}: {key!r} {many}; write cluster.nodes=8:80000")
    try:
        low, high, *rest = (float(part) for part in ends.split(":"))
        points = int(rest[0]) if rest else _POINTS
        if not (equals and 0 < low < high and 2 <= points <= 100 and len(rest) < 2):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--sweep {text}: write KEY=LOW:HIGH or KEY=LOW:HIGH:POINTS, with 0 < LOW < HIGH and 2 to 100 points"
        ) from None
    return names[0], [low * (high / low) ** (place / (points - 1)) for place in range(points)]


def sweep_curve(scenario: Scenario, text: str) -> Curve:
    """Goodput against one key. Nodes are rounded to whole replicas, and spares scaled with them."""
    key, values = parse_sweep(text)
    if key == "cluster.nodes":
        return _over_nodes(scenario, values)
    whole = isinstance(flat_scenario(scenario)[key], int)
    if whole:
        values = [float(value) for value in sorted({round(value) for value in values})]
    return curve(scenario, key, [int(value) for value in values] if whole else values)


def _over_nodes(scenario: Scenario, values: Sequence[float]) -> Curve:
    unit, spares = scenario.unit_nodes, scenario.cluster.spares / scenario.cluster.nodes
    sizes = sorted({max(2, round(value / unit)) * unit for value in values})
    curves = []
    for nodes in sizes:
        fitting = {
            "cluster__nodes": nodes,
            "cluster__spares": math.ceil(spares * nodes),
        }
        replicas = nodes * scenario.cluster.gpus_per_node // scenario.job.replica_gpus
        for key, at_most in (("stack", replicas), ("copies", replicas)):
            given = getattr(scenario.replication, key)
            if given is not None and given > at_most:
                fitting[f"replication__{key}"] = max(2, at_most)
        curves.append(curve(scenario.but(**fitting), "cluster.nodes", [nodes]))
    return Curve(
        "cluster.nodes",
        tuple(float(nodes) for nodes in sizes),
        {name: tuple(one.goodput[name][0] for one in curves) for name in scenario.systems},
        tuple(one.between[0] for one in curves),
    )


def study(question: Question, sweep: str | None = None, more: bool = True) -> Study:
    """Compare all systems; with `more`, also at other rates of failures and with changes."""
    scenario = question.scenario
    swept = parse_sweep(sweep) and sweep if sweep else None  # refuses a bad sweep before anything runs
    results = race(scenario)
    found = rates(scenario) if more else None
    ours = [name for name in ("recover-return", "recover") if name in results]
    crossed: list[tuple[str, str, float]] = [
        (one, other, place)
        for one in ours
        for other in results
        if found and other not in ours
        for place in crossings(found, one, other)
    ]
    told = answer(scenario, results, more)
    main = [place for place in crossed if place[:2] == (OURS, THEIRS)]
    if found and told and told.even and len(main) < 2 and found.values[0] < told.even < found.values[-1]:
        # The search of the answer is more exact than the line between two rates of few seeds.
        crossed = [(OURS, THEIRS, told.even), *(place for place in crossed if place not in main)]
    return Study(
        question,
        results,
        found,
        tuple(value_of_changes(scenario)) if more else (),
        sweep_curve(scenario, swept) if swept else None,
        told,
        detection(scenario),
        tuple(crossed),
    )


def name_of(system: str) -> str:
    return SYSTEMS[system]
