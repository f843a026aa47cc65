"""The pictures of a report: loss, steps, and the time that every incident took. Readable without colour vision."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from recover.job.optional_packages import need
from recover.runs.report.recorded_runs import Run
from recover.runs.report.wording import PHASES, victims

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # the palette of Okabe and Ito
_PHASE_COLOURS = dict(zip(PHASES, ("#E69F00", "#0072B2", "#009E73", "#56B4E9", "#CC79A7"), strict=True))
_PHASE_NAMES = dict(zip(PHASES, ("detect", "repair", "restore", "redo", "state"), strict=True))
STYLE: Any = {
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "legend.frameon": False,
    "savefig.dpi": 130,
}
WIDTH = 11.0
_MOST_BARS = 40
_CROWDED = 10  # marks; with more of them, only the numbers of replicas are shown
_SMOOTH_FROM, _REACH = 150, 7  # steps


def draw(runs: list[Run], output: Path) -> list[Path]:
    """Write the pictures for which these runs have data. Returns their paths, in the order of the page."""
    need("matplotlib", "a picture")
    from matplotlib import rc_context

    drawn = []
    with rc_context(STYLE):
        if any(run.steps for run in runs):
            drawn.append(save_figure(_loss(runs), output / "loss.png"))
            drawn.append(save_figure(_steps(runs), output / "steps.png"))
        if any(run.incidents for run in runs):
            drawn.append(save_figure(_incidents(runs), output / "incidents.png"))
    return drawn


def new_figure(height: float) -> Any:
    need("matplotlib", "a picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> Path:
    figure.savefig(path, format="png")
    return path


def _line(index: int, runs: list[Run]) -> dict[str, Any]:
    """The last run is a thin line, the ones below it wider and wider bands, so that curves that coincide are all
    visible."""
    below = (len(runs) - 1 - index) / max(len(runs) - 1, 1)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linewidth": 1.7 + 5.3 * below,
        "alpha": 0.45 if below else 1.0,
        "label": runs[index].name,
    }


def _loss(runs: list[Run]) -> Any:
    figure = new_figure(5.2)
    axes = figure.subplots()
    for index, run in enumerate(runs):
        steps, losses = run.column("loss")
        line = _line(index, runs)
        marker = "o" if len(steps) == 1 else ""
        if len(steps) >= _SMOOTH_FROM:
            axes.plot(steps, losses, color=line["color"], linewidth=0.6, alpha=0.35)
            axes.plot(steps, _smooth(losses), **line)
        else:
            axes.plot(steps, losses, marker=marker, **line)
    _mark_failures(axes, runs)
    axes.set_xlabel("step")
    smoothed = any(len(run.steps) >= _SMOOTH_FROM for run in runs)
    axes.set_ylabel("training loss (smoothed over the raw one)" if smoothed else "training loss")
    _whole_steps(axes)
    if len(runs) > 1:
        axes.legend(loc="upper right")
    return figure


def _smooth(values: list[float]) -> list[float]:
    """The mean over as many neighbours on both sides, which does not lag."""
    means = []
    for place in range(len(values)):
        reach = min(place, len(values) - 1 - place, _REACH)
        means.append(fmean(values[place - reach : place + reach + 1]))
    return means


def _mark_failures(axes: Any, runs: list[Run]) -> None:
    """A mark at every step with a death, and above it the replica: in rows, so that no two names overlap."""
    marks = sorted(
        (step, index) for index, run in enumerate(runs) for step in {i["step"] for i in run.incidents}
    )
    crowded = len(marks) > _CROWDED
    first, last = axes.get_xlim()
    letter = (last - first) / 115
    rows = [float("-inf")] * 3  # right end of the last name in each row
    for step, index in marks:
        colour = COLOURS[index % len(COLOURS)]
        axes.axvline(step, color=colour, linestyle=(0, (4, 3)), linewidth=0.6 if crowded else 1.1)
        name = " + ".join(victims(i) for i in runs[index].incidents if i["step"] == step)
        if crowded:
            name = name.removeprefix("replica").removeprefix("s").strip()
        half = (len(name) + 1.5) / 2 * letter
        row = next((row for row, end in enumerate(rows) if step - half > end), None)
        if row is not None:  # if all three rows are full, only the table of incidents has it
            rows[row] = step + half
            place, shift = (step, 1), (0, 4 + 14 * row)
            words = {"ha": "center", "fontsize": 10.5, "color": colour}
            axes.annotate(
                name, place, shift, xycoords=("data", "axes fraction"), textcoords="offset points", **words
            )


def _steps(runs: list[Run]) -> Any:
    figure = new_figure(8.0)
    batches, alive, speed = figure.subplots(3, 1, sharex=True)
    # Users' scripts record no tokens.
    unit = "tokens" if any("tokens" in line for run in runs for line in run.steps) else "microbatches"
    for index, run in enumerate(runs):
        line = _line(index, runs)
        for axes, key in ((batches, "microbatches"), (alive, "replicas")):
            axes.plot(*run.column(key), drawstyle="steps-mid", **line)
        timed = [s for s in run.steps if s.get("seconds") and s.get(unit)]
        speed.plot([s["step"] for s in timed], [s[unit] / s["seconds"] for s in timed], **line)
    constant = {run.global_batch for run in runs}
    batch = f" (B = {constant.pop()})" if len(constant) == 1 else ""
    batches.set_title(f"Microbatches in the committed step{batch}")
    alive.set_title("Replicas alive")
    speed.set_title(f"{unit.capitalize()} per second")
    speed.set_xlabel("step")
    speed.yaxis.set_major_formatter("{x:,.0f}")
    for axes in (batches, alive, speed):
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        _whole_steps(axes)
    alive.yaxis.get_major_locator().set_params(integer=True)
    batches.yaxis.get_major_locator().set_params(integer=True)
    if len(runs) > 1:
        batches.legend(loc="lower right", ncols=len(runs))
    return figure


def _incidents(runs: list[Run]) -> Any:
    """One bar per incident, with its phases one after the other."""
    incidents = [(run, incident) for run in runs for incident in run.incidents]
    heading = "What every incident took"
    if len(incidents) > _MOST_BARS:
        heading = f"What the {_MOST_BARS} longest of {len(incidents)} incidents took"
        longest = sorted(incidents, key=lambda pair: -sum(pair[1].get(key) or 0 for key in PHASES))[
            :_MOST_BARS
        ]
        incidents = [pair for pair in incidents if pair in longest]
    figure = new_figure(1.6 + 0.42 * len(incidents))
    axes = figure.subplots()
    places = range(len(incidents))
    left = [0.0] * len(incidents)
    for key, colour in _PHASE_COLOURS.items():
        widths = [float(incident.get(key) or 0) for _, incident in incidents]
        axes.barh(places, widths, left=left, height=0.62, color=colour, label=_PHASE_NAMES[key])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, total in zip(places, left, strict=True):
        axes.annotate(
            f"{total:,.0f} ms", (total, place), (5, 0), textcoords="offset points", va="center", fontsize=10.5
        )
    of = [f"{run.name}, " if len(runs) > 1 else "" for run, _ in incidents]
    labels = [f"{name}step {i['step']}: {victims(i)}" for name, (_, i) in zip(of, incidents, strict=True)]
    axes.set_yticks(places, labels)
    axes.set_ylim(len(incidents) - 0.5, -0.5)  # the first incident on top
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.1)
    axes.set_xlabel("milliseconds")
    axes.set_title(heading)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(PHASES))
    return figure


def _whole_steps(axes: Any) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)
