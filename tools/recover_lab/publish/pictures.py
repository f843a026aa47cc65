"""Pictures of benchmarks, on the page of all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from recover.job.optional_packages import need
from recover.runs.report.pictures import COLOURS, STYLE, new_figure, save_figure

OURS, THEIRS, CALM = COLOURS[0], COLOURS[1], COLOURS[2]
_RESTART = {
    "save": "#CC79A7",
    "normal": "#BBBBBB",
    "handling": "#E69F00",
    "load": "#F0E442",
    "restart": "#D55E00",
    "rerun": "#7F3B08",
}
_RECOVERY = {
    "normal": "#BBBBBB",
    "detect": "#E69F00",
    "repair": "#0072B2",
    "restore": "#009E73",
    "redo": "#56B4E9",
}


def draw(picture: Callable[[dict[str, Any]], Any], results: dict[str, Any], path: Path) -> Path:
    need("matplotlib", "a picture")
    from matplotlib import rc_context

    with rc_context(STYLE):
        return save_figure(picture(results), path)


def trajectory(results: dict[str, Any]) -> Any:
    figure = new_figure(9.0)
    loss, batches, speed = figure.subplots(3, 1, sharex=True)
    widths = {"stock": 1.0, "failure-free": 6.0, "ours": 1.7, "adaptive": 1.7}
    colours = {"stock": "0.3", "failure-free": CALM, "ours": OURS, "adaptive": THEIRS}
    for name, run in results["runs"].items():
        line = {"color": colours[name], "linewidth": widths[name], "alpha": 0.4 if widths[name] > 2 else 1}
        steps = [each["step"] for each in run["steps"]]
        for axes, key in ((loss, "loss"), (batches, "microbatches"), (speed, "effective_throughput")):
            axes.plot(steps, [each[key] for each in run["steps"]], label=name, **line)
        if name in ("ours", "adaptive"):
            provisioned = [each["per_provisioned_rank"] for each in run["steps"]]
            speed.plot(steps, provisioned, linestyle=":", label=f"{name}, per rank at the start", **line)
    for step, _ in results["scene"]["kills"]:
        for axes in (loss, batches, speed):
            axes.axvline(step, color="0.6", linestyle=(0, (4, 3)), linewidth=0.8)
    loss.set_title("Training loss; dashed marks are deaths")
    batches.set_title("Microbatches in the committed step")
    speed.set_title("Tokens per second and living rank")
    speed.set_xlabel("step")
    for axes in (batches, speed):
        axes.set_ylim(bottom=0)
    loss.legend()
    speed.legend(fontsize=9)
    return figure


def breakdown(results: dict[str, Any]) -> Any:
    rows = results["rows"]
    figure = new_figure(1.8 + 0.95 * len(rows))
    axes = figure.subplots()
    labels = []
    for place, row in enumerate(rows):
        for side, colours, offset in (("baseline", _RESTART, 0), ("ours", _RECOVERY, 1)):
            left = 0.0
            for piece, colour in colours.items():
                width = row[side]["pieces"][piece]
                name = piece if place == 0 and not (side == "ours" and piece == "normal") else None
                axes.barh(3 * place + offset, width, left=left, color=colour, label=name)
                left += width
            axes.annotate(
                f"{left:.1f} s",
                (left, 3 * place + offset),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=10,
            )
            labels.append(
                (3 * place + offset, f"N = {row['N']}, {'restart' if side == 'baseline' else side}")
            )
    axes.set_yticks([place for place, _ in labels], [label for _, label in labels])
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("seconds, from the checkpoint after step N until step 1.5N is complete")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


def multi(results: dict[str, Any]) -> Any:
    figure = new_figure(4.8)
    speed, tokens = figure.subplots(1, 2)
    ours = results["ours"]
    places = range(1, len(ours["intervals"]) + 1)
    for key, style, name in (
        ("effective_throughput", "-", "ours"),
        ("per_provisioned_rank", ":", "ours, per rank at the start"),
    ):
        speed.plot(
            places, [each[key] for each in ours["intervals"]], style, color=OURS, marker="o", label=name
        )
    tokens.plot(*zip(*ours["progress"], strict=True), color=OURS, drawstyle="steps-post", label="ours")
    for number, theirs in enumerate(results["baselines"]):
        colour = (THEIRS, COLOURS[3])[number]
        name = f"restart, saving every {theirs['save_every']}"
        values = [each["effective_throughput"] for each in theirs["intervals"]]
        speed.plot(places, values, color=colour, marker="s", label=name)
        tokens.plot(*zip(*theirs["progress"], strict=True), color=colour, drawstyle="steps-post", label=name)
    speed.set_title("Tokens per second and living rank")
    speed.set_xlabel("after so many failures")
    speed.set_xticks(list(places))
    speed.set_ylim(bottom=0)
    tokens.set_title("Tokens against rank-seconds")
    tokens.set_xlabel("rank-seconds")
    speed.legend(fontsize=9)
    tokens.legend(fontsize=9)
    return figure


def sweep(results: dict[str, Any]) -> Any:
    figure = new_figure(5.2)
    axes = figure.subplots()
    for number, curve in enumerate(results["curves"]):
        line = {"color": COLOURS[number % len(COLOURS)]}
        axes.plot(
            curve["share"], curve["effective"], label=f"{curve['alive']} alive, per living rank", **line
        )
        axes.plot(curve["share"], curve["wall"], ":", label=f"{curve['alive']} alive, per hour", **line)
        points = [point for point in results["measured"] if point["alive"] == curve["alive"]]
        axes.plot([p["share"] for p in points], [p["measured"] for p in points], "o", **line)
    axes.axhline(1, color="0.4", linewidth=0.8)
    axes.axvline(results["production_share"], color="0.4", linestyle=(0, (4, 3)), linewidth=0.8)
    place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "fontsize": 10}
    axes.annotate("production", (results["production_share"], 0.92), (4, 0), **place)
    axes.set_xscale("log")
    axes.set_xlabel("stall of a restart, as a share of the time of the steps between failures")
    axes.set_title(
        "How many times more tokens than checkpoint-restart at its best (dots: measured end to end)"
    )
    axes.legend(fontsize=9)
    return figure
