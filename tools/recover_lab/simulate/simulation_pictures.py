"""Pictures of a simulated cluster: parts of the time, and goodput of all systems against one key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recover.runs.report.pictures import STYLE, new_figure, save_figure
from recover_lab.simulate.account import PARTS
from recover_lab.simulate.break_even import Curve
from recover_lab.simulate.scenario_keys import SYSTEMS
from recover_lab.simulate.study import Study, name_of, span

_PART_COLOURS = {
    "productive": "#BBBBBB",
    "detect": "#E69F00",
    "repair": "#0072B2",
    "redo": "#56B4E9",
    "discarded": "#882255",
    "rework": "#7F3B08",
    "restart": "#D55E00",
    "joining": "#44AA99",
    "missing": "#CC79A7",
    "uneven": "#F0E442",
    "redundant": "#332288",
    "vote": "#88CCEE",
    "waiting": "#999933",
    "checkpoint": "#AA4499",
    "stragglers": "#117733",
    "spares": "#DDDDDD",
}
_LINES: dict[str, tuple[str, str]] = {  # ours solid and dark, the others by kind
    "restart": ("#D55E00", "-"),
    "restart-paper": ("#D55E00", ":"),
    "restart-memory": ("#E69F00", "-"),
    "recover": ("#0072B2", "--"),
    "recover-return": ("#0072B2", "-"),
    "torchft": ("#009E73", "-"),
    "torchft-spares": ("#009E73", ":"),
    "replication": ("#CC79A7", "-"),
    "stacked": ("#CC79A7", ":"),
}
assert _LINES.keys() == SYSTEMS.keys()
assert _PART_COLOURS.keys() == PARTS.keys()


def draw_simulation(study: Study, output: Path) -> dict[str, Path]:
    """Pictures by name, in the order of the page."""
    from matplotlib import rc_context

    drawn = {}
    with rc_context(STYLE):
        drawn["parts"] = save_figure(_parts(study), output / "parts.png")
        if study.rates:
            figure = _curve(
                study.rates, "failures per node and day", study.question.scenario.failures.per_node_day
            )
            drawn["rates"] = save_figure(figure, output / "rates.png")
        if study.sweep:
            drawn["sweep"] = save_figure(draw_curve(study.sweep), output / "sweep.png")
    return drawn


def draw_curve(curve: Curve) -> Any:
    return _curve(curve, "nodes" if curve.key == "cluster.nodes" else curve.key, None)


def _parts(study: Study) -> Any:
    results = list(study.results.values())
    figure = new_figure(2.2 + 0.5 * len(results))
    axes = figure.subplots()
    left = [0.0] * len(results)
    for part, name in PARTS.items():
        widths = [100 * max(result.parts[part], 0.0) for result in results]
        if max(widths) < 0.05:
            continue
        axes.barh(range(len(results)), widths, left=left, height=0.66, color=_PART_COLOURS[part], label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, result in enumerate(results):
        good = result.goodput.mean
        inside = good > 0.12
        axes.annotate(
            f"{good:.1%}",
            (100 * good, place),
            (-6 if inside else 6, 0),
            textcoords="offset points",
            ha="right" if inside else "left",
            va="center",
            fontsize=10.5,
        )
    axes.set_yticks(range(len(results)), [name_of(result.system) for result in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("percent of all GPU time")
    axes.set_title(study.question.title)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=10)
    return figure


def _curve(curve: Curve, label: str, here: float | None) -> Any:
    figure = new_figure(5.4)
    axes = figure.subplots()
    for name, values in curve.goodput.items():
        colour, style = _LINES[name]
        axes.plot(curve.values, [100 * value for value in values], style, color=colour, label=name_of(name))
    axes.set_xscale("log")
    axes.set_ylim(0, 100)
    axes.set_xlabel(label)
    axes.set_ylabel("goodput, percent of all GPU time")
    if here is not None:
        axes.axvline(here, color="0.4", linestyle=(0, (4, 3)), linewidth=0.9)
    top = axes.secondary_xaxis("top")
    top.set_xticks(curve.values, [span(seconds) for seconds in curve.between], fontsize=9)
    top.set_xlabel("a failure every", fontsize=10)
    top.minorticks_off()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=10)
    return figure
